// Compiled once per instruction set, with KVG_ISA naming it. Nothing but plain loops and headers of
// that namespace in here: a template of the standard library instantiated with wide instructions
// could be the copy that the linker keeps for everyone.
#include "cpu/kernels.h"

#include <cstring>

#include "cpu/vector.h"

namespace kvg::KVG_ISA {
namespace {

// ---- scores and weighted sums of a tile -------------------------------------------------------

// Query rows that a block takes together: with 4 keys each, what fits into the registers.
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
  int64_t m = 0;
  for (; m + kRows <= rows; m += kRows)
    dot_rows<Element, kRows, 4>(q_MD + m * stride, key_J, s_MJ + m * kKeys, width, stride, keys);
  for (; m < rows; ++m)
    dot_rows<Element, 1, 8>(q_MD + m * stride, key_J, s_MJ + m * kKeys, width, stride, keys);
}

void dot(const float* q_MD, const void* const* key_J, int32_t dtype, float* s_MJ, int64_t rows,
         int64_t width, int64_t stride, int64_t keys) {
  if (dtype == KVG_FLOAT32) return dot_of<Float32>(q_MD, key_J, s_MJ, rows, width, stride, keys);
  if (dtype == KVG_BFLOAT16) return dot_of<BFloat16>(q_MD, key_J, s_MJ, rows, width, stride, keys);
  if (dtype == KVG_INT8) return dot_of<Int8>(q_MD, key_J, s_MJ, rows, width, stride, keys);
  dot_of<Float16>(q_MD, key_J, s_MJ, rows, width, stride, keys);
}

// Rows x Keys weighted rows at a time, added to the output.
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
  int64_t m = 0;
  for (; m + kRows <= rows; m += kRows)
    add_rows<Element, kRows, 4>(p_MJ + m * kKeys, value_J, out_ME + m * stride, width, stride, keys);
  for (; m < rows; ++m)
    add_rows<Element, 1, 8>(p_MJ + m * kKeys, value_J, out_ME + m * stride, width, stride, keys);
}

void add(const float* p_MJ, const void* const* value_J, int32_t dtype, float* out_ME, int64_t rows,
         int64_t width, int64_t stride, int64_t keys) {
  if (dtype == KVG_FLOAT32) return add_of<Float32>(p_MJ, value_J, out_ME, rows, width, stride, keys);
  if (dtype == KVG_BFLOAT16) return add_of<BFloat16>(p_MJ, value_J, out_ME, rows, width, stride, keys);
  if (dtype == KVG_INT8) return add_of<Int8>(p_MJ, value_J, out_ME, rows, width, stride, keys);
  add_of<Float16>(p_MJ, value_J, out_ME, rows, width, stride, keys);
}

// ---- the same in bfloat16 ---------------------------------------------------------------------

#if defined(__AVX512BF16__)
constexpr int kPairs = 32;  // elements of one vector of bfloat16

__m512bh load_bf16(const void* from, __mmask32 mask) {
  return (__m512bh)_mm512_maskz_loadu_epi16(mask, from);
}

__mmask32 first_of(int64_t count) {
  return count >= kPairs ? 0xffffffffu : (1u << count) - 1;
}

template <int Rows, int Keys>
void dot_bf16_block(const uint16_t* q_MD, const void* const* key_J, float* s_MJ, int64_t width) {
  __m512 parts[Rows][Keys] = {};
  for (int64_t d = 0; d < width; d += kPairs) {
    const __mmask32 mask = first_of(width - d);
    __m512bh k[Keys];
    KVG_UNROLL
    for (int j = 0; j < Keys; ++j)
      k[j] = load_bf16(static_cast<const uint16_t*>(key_J[j]) + d, mask);
    KVG_UNROLL
    for (int m = 0; m < Rows; ++m) {
      const __m512bh q = load_bf16(q_MD + m * width + d, mask);
      KVG_UNROLL
      for (int j = 0; j < Keys; ++j) parts[m][j] = _mm512_dpbf16_ps(parts[m][j], q, k[j]);
    }
  }
  KVG_UNROLL
  for (int m = 0; m < Rows; ++m) {
    float four[4];
    sums((Vector)parts[m][0], (Vector)parts[m][1 % Keys], (Vector)parts[m][2 % Keys],
         (Vector)parts[m][3 % Keys], four);
    std::memcpy(s_MJ + m * kKeys, four, Keys * sizeof(float));
  }
}

template <int Rows>
void dot_bf16_rows(const uint16_t* q_MD, const void* const* key_J, float* s_MJ, int64_t width,
                   int64_t keys) {
  int64_t j = 0;
  for (; j + 4 <= keys; j += 4) dot_bf16_block<Rows, 4>(q_MD, key_J + j, s_MJ + j, width);
  for (; j < keys; ++j) dot_bf16_block<Rows, 1>(q_MD, key_J + j, s_MJ + j, width);
}

void dot_bf16(const uint16_t* q_MD, const void* const* key_J, float* s_MJ, int64_t rows,
              int64_t width, int64_t keys) {
  int64_t m = 0;
  for (; m + kRows <= rows; m += kRows)
    dot_bf16_rows<kRows>(q_MD + m * width, key_J, s_MJ + m * kKeys, width, keys);
  for (; m < rows; ++m)
    dot_bf16_rows<1>(q_MD + m * width, key_J, s_MJ + m * kKeys, width, keys);
}

// Columns [e, e + kWide) of all keys, two keys at a time: elements of both lie side by side, and the
// output stays in registers.
constexpr int kWide = 64;

template <int Rows>
void add_bf16_block(const uint32_t* p_MP, const void* const* value_J, float* out_ME, int64_t width,
                    int64_t keys, int64_t e) {
  constexpr int kHalves = kWide / kPairs;
  alignas(64) uint16_t order[2][kPairs];
  for (int i = 0; i < kPairs; ++i) {
    order[0][i] = static_cast<uint16_t>(i / 2 + i % 2 * kPairs);
    order[1][i] = static_cast<uint16_t>(order[0][i] + kPairs / 2);
  }
  const __m512i front = _mm512_load_si512(order[0]), back = _mm512_load_si512(order[1]);
  __mmask32 mask[kHalves];
  __m512 out[Rows][2 * kHalves];
  KVG_UNROLL
  for (int h = 0; h < kHalves; ++h) {
    const int64_t left = width - e - h * kPairs;
    mask[h] = first_of(left < 0 ? 0 : left);
  }
  KVG_UNROLL
  for (int m = 0; m < Rows; ++m) {
    KVG_UNROLL
    for (int h = 0; h < 2 * kHalves; ++h)
      out[m][h] = _mm512_maskz_loadu_ps(static_cast<__mmask16>(mask[h / 2] >> h % 2 * 16),
                                        out_ME + m * width + e + h * 16);
  }
  for (int64_t j = 0; j < keys; j += 2) {
    const auto* a = static_cast<const uint16_t*>(value_J[j]) + e;
    const auto* b = static_cast<const uint16_t*>(value_J[j + 1 < keys ? j + 1 : j]) + e;
    __m512bh v[2 * kHalves];
    KVG_UNROLL
    for (int h = 0; h < kHalves; ++h) {
      const __m512i one = _mm512_maskz_loadu_epi16(mask[h], a + h * kPairs);
      const __m512i two = _mm512_maskz_loadu_epi16(mask[h], b + h * kPairs);
      v[2 * h] = (__m512bh)_mm512_permutex2var_epi16(one, front, two);
      v[2 * h + 1] = (__m512bh)_mm512_permutex2var_epi16(one, back, two);
    }
    KVG_UNROLL
    for (int m = 0; m < Rows; ++m) {
      const uint32_t pair = p_MP[m * (kKeys / 2) + j / 2];
      const __m512bh p = (__m512bh)_mm512_maskz_set1_epi32(0xffff, static_cast<int32_t>(pair));
      KVG_UNROLL
      for (int h = 0; h < 2 * kHalves; ++h) out[m][h] = _mm512_dpbf16_ps(out[m][h], p, v[h]);
    }
  }
  KVG_UNROLL
  for (int m = 0; m < Rows; ++m) {
    KVG_UNROLL
    for (int h = 0; h < 2 * kHalves; ++h)
      _mm512_mask_storeu_ps(out_ME + m * width + e + h * 16,
                            static_cast<__mmask16>(mask[h / 2] >> h % 2 * 16), out[m][h]);
  }
}

template <int Rows>
void add_bf16_rows(const float* p_MJ, const void* const* value_J, float* out_ME, int64_t width,
                   int64_t keys) {
  alignas(64) uint32_t pairs[Rows][kKeys / 2];
  for (int m = 0; m < Rows; ++m)
    for (int64_t j = 0; j < keys; j += kPairs) {
      const float* p = p_MJ + m * kKeys + j;
      const __mmask32 mask = first_of(keys - j);
      const __m512 low = _mm512_maskz_loadu_ps(static_cast<__mmask16>(mask), p);
      const __m512 high = _mm512_maskz_loadu_ps(static_cast<__mmask16>(mask >> 16), p + 16);
      _mm512_store_si512(&pairs[m][j / 2], (__m512i)_mm512_cvtne2ps_pbh(high, low));
    }
  for (int64_t e = 0; e < width; e += kWide)
    add_bf16_block<Rows>(pairs[0], value_J, out_ME, width, keys, e);
}

void add_bf16(const float* p_MJ, const void* const* value_J, float* out_ME, int64_t rows,
              int64_t width, int64_t keys) {
  int64_t m = 0;
  for (; m + kRows <= rows; m += kRows)
    add_bf16_rows<kRows>(p_MJ + m * kKeys, value_J, out_ME + m * width, width, keys);
  for (; m < rows; ++m)
    add_bf16_rows<1>(p_MJ + m * kKeys, value_J, out_ME + m * width, width, keys);
}
#else
constexpr decltype(Kernels::dot_bf16) dot_bf16 = nullptr;
constexpr decltype(Kernels::add_bf16) add_bf16 = nullptr;
#endif

// ---- softmax ----------------------------------------------------------------------------------

void scale(float* x, float factor, int64_t count) {
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) x[i] *= factor;
}

// Makes `other` the top if it is larger: what weights relative to the old top are worth now.
float raise(Softmax* state, float other) {
  const float before = state->top;
  state->top = other > before ? other : before;
  const float kept = state->top == -kInfinity ? 1.0f : exp2_of_negative(before - state->top);
  state->sum *= kept;
  return kept;
}

void weigh(float* s_J, int64_t begin, int64_t end, int64_t keys, float softcap, Softmax* state,
           float* out_E, int64_t width) {
  if (softcap > 0) {
#pragma omp simd
    for (int64_t j = begin; j < end; ++j) s_J[j] = softcap * tanh_of(s_J[j]);
  }
  float top = -kInfinity;
#pragma omp simd reduction(max : top)
  for (int64_t j = begin; j < end; ++j) top = s_J[j] > top ? s_J[j] : top;
  const float kept = raise(state, top);
  if (kept != 1.0f) scale(out_E, kept, width);
  const float base = state->top == -kInfinity ? 0.0f : state->top;
  float total = 0;
#pragma omp simd reduction(+ : total)
  for (int64_t j = begin; j < end; ++j) {
    s_J[j] = exp2_of_negative(s_J[j] - base);
    total += s_J[j];
  }
  state->sum += total;
  for (int64_t j = 0; j < begin; ++j) s_J[j] = 0;
  for (int64_t j = end; j < keys; ++j) s_J[j] = 0;
}

void join(Softmax* state, float* out_E, Softmax other, const float* other_E, int64_t width) {
  if (other.top == -kInfinity && other.sum == 0) return;  // saw no key
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
  scale(out_E, kept / state.sum, width);
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
    dot, add, dot_bf16, add_bf16, weigh, join, finish, scale};

}  // namespace kvg::KVG_ISA
