// Compiled once per instruction set, with KVG_ISA naming it. This file has only plain loops and
// headers of that namespace: the linker keeps one copy of a template of the standard library, which
// could be one with wide instructions.
#include "cpu/kernels.h"

#include <cstring>

#include "cpu/sampling_kernels.h"
#include "cpu/stream_kernels.h"
#include "cpu/tile_kernels.h"
#include "cpu/vector.h"

namespace kvg::KVG_ISA {
namespace {

// ---- scores and weighted sums of a tile -------------------------------------------------------

// Query rows of a block: with 4 keys each, their sums fit into the registers.
#if defined(__AVX512F__)
constexpr int kRows = 4;
#else
constexpr int kRows = 2;
#endif

template <class Element>
using Pointer = const typename Element::Word*;

// Rows x Keys dot products: one pass over the width with all sums in registers.
template <class Element, int Rows, int Keys>
void dot_block(const float* q_MD, const void* const* key_J, float* s_MJ, int64_t width,
               int64_t stride) {
  Vector parts[Rows][Keys] = {};
  Pointer<Element> keys[Keys];
  KVG_UNROLL
  for (int j = 0; j < Keys; ++j) keys[j] = static_cast<Pointer<Element>>(key_J[j]);
  int64_t d = 0;
  for (; d + kLanes <= width; d += kLanes) {
    Vector k[Keys];
    KVG_UNROLL
    for (int j = 0; j < Keys; ++j) k[j] = load(Element{}, keys[j] + d);
    KVG_UNROLL
    for (int m = 0; m < Rows; ++m) {
      const Vector q = load(Float32{}, q_MD + m * stride + d);
      KVG_UNROLL
      for (int j = 0; j < Keys; ++j) parts[m][j] += q * k[j];
    }
  }
  KVG_UNROLL
  for (int m = 0; m < Rows; ++m) {
    KVG_UNROLL
    for (int j = 0; j + 4 <= Keys; j += 4)
      sums(parts[m][j], parts[m][j + 1], parts[m][j + 2], parts[m][j + 3], s_MJ + m * kKeys + j);
    KVG_UNROLL
    for (int j = Keys / 4 * 4; j < Keys; ++j) s_MJ[m * kKeys + j] = sum(parts[m][j]);
  }
  for (; d < width; ++d)
    for (int m = 0; m < Rows; ++m)
      for (int j = 0; j < Keys; ++j)
        s_MJ[m * kKeys + j] += q_MD[m * stride + d] * Element::decode(keys[j][d]);
}

template <class Element, int Rows, int Keys>
void dot_rows(const float* q_MD, const void* const* key_J, float* s_MJ, int64_t width,
              int64_t stride, int64_t keys) {
  int64_t j = 0;
  for (; j + Keys <= keys; j += Keys)
    dot_block<Element, Rows, Keys>(q_MD, key_J + j, s_MJ + j, width, stride);
  for (; j < keys; ++j) dot_block<Element, Rows, 1>(q_MD, key_J + j, s_MJ + j, width, stride);
}

template <class Element>
void dot_of(const float* q_MD, const void* const* key_J, float* s_MJ, int64_t rows, int64_t width,
            int64_t stride, int64_t keys) {
  by_rows<kRows>(rows, [&](auto block, int64_t m) {
    constexpr int kKeysAtOnce = block.kCount == 1 ? 8 : 4;
    dot_rows<Element, block.kCount, kKeysAtOnce>(q_MD + m * stride, key_J, s_MJ + m * kKeys, width,
                                                 stride, keys);
  });
}

void dot(const float* q_MD, const void* const* key_J, int32_t dtype, float* s_MJ, int64_t rows,
         int64_t width, int64_t stride, int64_t keys) {
  if (dtype == KVG_FLOAT32) return dot_of<Float32>(q_MD, key_J, s_MJ, rows, width, stride, keys);
  if (dtype == KVG_BFLOAT16) return dot_of<BFloat16>(q_MD, key_J, s_MJ, rows, width, stride, keys);
  if (dtype == KVG_INT8) return dot_of<Int8>(q_MD, key_J, s_MJ, rows, width, stride, keys);
  dot_of<Float16>(q_MD, key_J, s_MJ, rows, width, stride, keys);
}

// Adds Keys value rows to Rows output rows, with a weight for each pair.
template <class Element, int Rows, int Keys>
void add_block(const float* p_MJ, const void* const* value_J, float* out_ME, int64_t width,
               int64_t stride) {
  float p[Rows][Keys];
  Pointer<Element> values[Keys];
  KVG_UNROLL
  for (int j = 0; j < Keys; ++j) values[j] = static_cast<Pointer<Element>>(value_J[j]);
  KVG_UNROLL
  for (int m = 0; m < Rows; ++m) {
    KVG_UNROLL
    for (int j = 0; j < Keys; ++j) p[m][j] = p_MJ[m * kKeys + j];
  }
  int64_t e = 0;
  for (; e + kLanes <= width; e += kLanes) {
    Vector v[Keys];
    KVG_UNROLL
    for (int j = 0; j < Keys; ++j) v[j] = load(Element{}, values[j] + e);
    KVG_UNROLL
    for (int m = 0; m < Rows; ++m) {
      Vector out = load(Float32{}, out_ME + m * stride + e);
      KVG_UNROLL
      for (int j = 0; j < Keys; ++j) out += p[m][j] * v[j];
      save(out_ME + m * stride + e, out);
    }
  }
  for (; e < width; ++e)
    for (int m = 0; m < Rows; ++m)
      for (int j = 0; j < Keys; ++j) out_ME[m * stride + e] += p[m][j] * Element::decode(values[j][e]);
}

template <class Element, int Rows, int Keys>
void add_rows(const float* p_MJ, const void* const* value_J, float* out_ME, int64_t width,
              int64_t stride, int64_t keys) {
  int64_t j = 0;
  for (; j + Keys <= keys; j += Keys)
    add_block<Element, Rows, Keys>(p_MJ + j, value_J + j, out_ME, width, stride);
  for (; j < keys; ++j) add_block<Element, Rows, 1>(p_MJ + j, value_J + j, out_ME, width, stride);
}

template <class Element>
void add_of(const float* p_MJ, const void* const* value_J, float* out_ME, int64_t rows,
            int64_t width, int64_t stride, int64_t keys) {
  by_rows<kRows>(rows, [&](auto block, int64_t m) {
    constexpr int kKeysAtOnce = block.kCount == 1 ? 8 : 4;
    add_rows<Element, block.kCount, kKeysAtOnce>(p_MJ + m * kKeys, value_J, out_ME + m * stride,
                                                 width, stride, keys);
  });
}

void add(const float* p_MJ, const void* const* value_J, int32_t dtype, float* out_ME, int64_t rows,
         int64_t width, int64_t stride, int64_t keys) {
  if (dtype == KVG_FLOAT32) return add_of<Float32>(p_MJ, value_J, out_ME, rows, width, stride, keys);
  if (dtype == KVG_BFLOAT16) return add_of<BFloat16>(p_MJ, value_J, out_ME, rows, width, stride, keys);
  if (dtype == KVG_INT8) return add_of<Int8>(p_MJ, value_J, out_ME, rows, width, stride, keys);
  add_of<Float16>(p_MJ, value_J, out_ME, rows, width, stride, keys);
}

// ---- softmax ----------------------------------------------------------------------------------

void scale(float* x, float factor, int64_t count) {
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) x[i] *= factor;
}

// Makes `other` the top if it is larger. Returns the factor of weights relative to the old top.
float raise(Softmax* state, float other) {
  const float before = state->top;
  state->top = other > before ? other : before;
  const float kept = state->top == -kInfinity ? 1.0f : exp2_of_negative(before - state->top);
  state->sum *= kept;
  return kept;
}

// Scores may exceed the top by this much before it rises: until then, weights do not wait for it.
constexpr float kSlack = 8.0f;

// Weighs Rows rows, at most four; reductions over four vectors repeat the last row.
template <int Rows>
void weigh_rows(float* s_MJ, int64_t begin, int64_t end, float factor, float softcap,
                Softmax* state_M, float* out_ME, int64_t width) {
  constexpr int kVectors = kKeys / kLanes;
  const auto row = [](int m) { return m < Rows ? m : Rows - 1; };
  const Index after = lane_numbers() - static_cast<int32_t>(begin);
  const auto seen = static_cast<int32_t>(end - begin);
  Vector scores[Rows][kVectors], top_M[Rows], total_M[Rows] = {}, before = {}, sum = {};
  KVG_UNROLL
  for (int m = 0; m < Rows; ++m) {
    top_M[m] = Vector{} - kInfinity;
    before[m] = state_M[m].top, sum[m] = state_M[m].sum;
    KVG_UNROLL
    for (int i = 0; i < kVectors; ++i) {
      Vector x = load(Float32{}, s_MJ + m * kKeys + i * kLanes) * factor;
      if (softcap > 0) x = softcap * tanh_of(x);
      const Index at = after + i * kLanes;
      x = ((at >= 0) & (at < seen)) ? x : Vector{} - kInfinity;
      scores[m][i] = x, top_M[m] = larger(x, top_M[m]);
    }
  }
  const Vector seen_top = reduce<larger>(top_M[row(0)], top_M[row(1)], top_M[row(2)], top_M[row(3)]);
  bool grew = false;
  KVG_UNROLL
  for (int m = 0; m < Rows; ++m) grew |= seen_top[m] > state_M[m].top + kSlack;
  Vector top = before, kept = Vector{} + 1.0f;
  if (grew) {
    top = larger(seen_top, before);
    KVG_UNROLL
    for (int m = 0; m < Rows; ++m) top[m] = __builtin_ceilf(top[m]);
    kept = exp2_of_negative(before - (top == -kInfinity ? Vector{} : top));
    kept = top == -kInfinity ? Vector{} + 1.0f : kept;
  }
  const Vector base = top == -kInfinity ? Vector{} : top;
  KVG_UNROLL
  for (int m = 0; m < Rows; ++m) {
    KVG_UNROLL
    for (int i = 0; i < kVectors; ++i) {
      const Vector weights = exp2_of_negative(scores[m][i] - base[m]);
      save(s_MJ + m * kKeys + i * kLanes, weights);
      total_M[m] += weights;
    }
  }
  sum = sum * kept +
        reduce<plus>(total_M[row(0)], total_M[row(1)], total_M[row(2)], total_M[row(3)]);
  KVG_UNROLL
  for (int m = 0; m < Rows; ++m) {
    state_M[m] = {top[m], sum[m]};
    if (grew && kept[m] != 1.0f) scale(out_ME + m * width, kept[m], width);
  }
}

void weigh(float* s_MJ, int64_t rows, int64_t begin, int64_t end, float factor, float softcap,
           Softmax* state_M, float* out_ME, int64_t width) {
  by_rows<4>(rows, [&](auto block, int64_t m) {
    weigh_rows<block.kCount>(s_MJ + m * kKeys, begin, end, factor, softcap, state_M + m,
                             out_ME + m * width, width);
  });
}

void join(Softmax* state, float* out_E, Softmax other, const float* other_E, int64_t width) {
  if (other.top == -kInfinity && other.sum == 0) return;  // it saw no key
  const float kept = raise(state, other.top);
  const float weight = exp2_of_negative(other.top - state->top);
  state->sum += weight * other.sum;
#pragma omp simd
  for (int64_t e = 0; e < width; ++e) out_E[e] = out_E[e] * kept + other_E[e] * weight;
}

void finish(Softmax state, float sink, float* out_E, int64_t width) {
  float kept = 1.0f;
  if (sink != -kInfinity) {
    kept = raise(&state, sink);
    state.sum += exp2_of_negative(sink - state.top);
  }
  // A zero becomes +0: the sign of a sum that underflows depends on how many tiles were added.
  const float factor = kept / state.sum;
#pragma omp simd
  for (int64_t i = 0; i < width; ++i) out_E[i] = out_E[i] * factor + 0.0f;
}

// ---- dtypes -----------------------------------------------------------------------------------

template <class Element>
void to_float(const void* from, float* to, size_t count) {
  const auto* in = static_cast<Pointer<Element>>(from);
#pragma omp simd
  for (size_t i = 0; i < count; ++i) to[i] = Element::decode(in[i]);
}

#if defined(__F16C__)
template <>
void to_float<Float16>(const void* from, float* to, size_t count) {
  const auto* in = static_cast<const uint16_t*>(from);
  size_t i = 0;
  for (; i + kLanes <= count; i += kLanes) save(to + i, load(Float16{}, in + i));
  for (; i < count; ++i) to[i] = Float16::decode(in[i]);
}
#endif

template <class Element>
void from_float(const float* from, void* to, size_t count) {
  auto* out = static_cast<typename Element::Word*>(to);
#pragma omp simd
  for (size_t i = 0; i < count; ++i) out[i] = Element::encode(from[i]);
}

template <class Element>
constexpr Dtype row() {
  return {sizeof(typename Element::Word), to_float<Element>, from_float<Element>};
}

}  // namespace

extern const Kernels kKernels;
const Kernels kKernels = {
    {{}, row<Float32>(), row<Float16>(), row<BFloat16>(), row<Int8>(), row<Float8>()},
    dot, add, weigh, join, finish, scale, argmax, group_maxima, weigh_groups, reached_by, at_least,
    {nullptr, nullptr, nullptr, kTilesBFloat16, kTilesInt8, kTilesBFloat16},
    {nullptr, nullptr, nullptr, kStreamsBFloat16, kStreamsInt8}};

}  // namespace kvg::KVG_ISA
