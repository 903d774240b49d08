#include "cpu/heads.h"

#include <cmath>

#include "cpu/kernels.h"

namespace kvg {

namespace {

// Rotates pairs (a[i * Step], b[i * Step]).
template <int Step>
void rotate(float* __restrict a, float* __restrict b, const float* __restrict cosines,
            const float* __restrict sines, int64_t pairs) {
#pragma omp simd
  for (int64_t i = 0; i < pairs; ++i) {
    const float x = a[i * Step], y = b[i * Step];
    a[i * Step] = x * cosines[i] - y * sines[i];
    b[i * Step] = y * cosines[i] + x * sines[i];
  }
}

}  // namespace

void HeadNorm::apply(float* __restrict x) const {
  const size_t width = weight.size();
  const float* __restrict factors = weight.data();
  float squares = 0;
#pragma omp simd reduction(+ : squares)
  for (size_t i = 0; i < width; ++i) squares += x[i] * x[i];
  const float rate = 1 / std::sqrt(squares / static_cast<float>(width) + epsilon);
#pragma omp simd
  for (size_t i = 0; i < width; ++i) x[i] = x[i] * rate * factors[i];
}

void Rope::apply(float* x, int64_t position) const {
  const int64_t half = rotary / 2;
  const float* cosines = cos_sin + position * rotary;
  if (interleaved)
    rotate<2>(x, x + 1, cosines, cosines + half, half);
  else
    rotate<1>(x, x + half, cosines, cosines + half, half);
}

Rope check_rope(const Operands& in, int cos_sin, int64_t style, const Rows& rows) {
  using ll = long long;
  const char* op = in.op.name;
  if (style != 0 && style != 1)
    refuse("%s: rope_style: expected 0 (halves) or 1 (interleaved), got %lld", op, ll{style});
  if (!in.has(cos_sin)) return {nullptr, 0, false};
  const int64_t rotary = in.dims[KVG_DIM_ROTARY_DIM], width = in.dims[KVG_DIM_HEAD_DIM];
  if (rotary % 2 || rotary > width)
    refuse("%s: cos_sin: dim rotary_dim: expected an even number of at most head_dim %lld, got "
           "%lld", op, ll{width}, ll{rotary});
  const int64_t positions = in.dims[KVG_DIM_MAX_POSITIONS];
  for (int64_t b = 0; b < rows.count; ++b)
    if (rows.fresh(b) > 0 && rows.length(b) > positions)
      refuse("%s: cos_sin: dim max_positions: expected at least the %lld tokens of row %lld, got "
             "%lld", op, ll{rows.length(b)}, ll{b}, ll{positions});
  return {in.data<const float>(cos_sin), rotary, style == 1};
}

HeadNorm head_norm(const Operands& in, int norm, float epsilon, float offset) {
  HeadNorm made{{}, epsilon};
  if (!in.has(norm)) return made;
  made.weight.resize(static_cast<size_t>(in.dims[KVG_DIM_HEAD_DIM]));
  dtype(in.dtype(norm)).to_float(in.data<const char>(norm), made.weight.data(), made.weight.size());
  for (float& factor : made.weight) factor += offset;
  return made;
}

}  // namespace kvg
