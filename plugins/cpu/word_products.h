// Products of pairs of 16-bit words for attention: of bfloat16 with sums in float32, or of integers
// with exact sums. As integers, queries and weights are multiples of a unit, their largest
// magnitude / 32767. Kernels of few and of many query rows use the same words, so that a row's
// result does not depend on the number of rows.
#pragma once

#include "cpu/kernels.h"
#include "cpu/vector.h"
#include "cpu/words.h"

namespace kvg::KVG_ISA {

#if defined(__AVX512BF16__) && defined(__AVX512VNNI__)
constexpr float kLargest = 32767.0f;

struct BFloat16Products {
  using Word = uint16_t;
  using Sum = __m512;
  static constexpr bool kScaled = false;  // whether words are multiples of a unit
  static __m512i words(const void* row, __mmask32 mask) {
    return _mm512_maskz_loadu_epi16(mask, row);
  }
  static Sum plus_products(Sum sum, __m512i a, __m512i b) {
    return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b);
  }
  static Sum plus(Sum a, Sum b) { return a + b; }
  static Vector floats(Sum sum) { return (Vector)sum; }
  static __m512i round(Vector low, Vector high, float) {
    return (__m512i)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low);
  }
};

struct Int8Products {
  using Word = int8_t;
  using Sum = Index;  // with __m512i, which has other lanes, GCC copies each sum twice
  static constexpr bool kScaled = true;
  static __m512i words(const void* row, __mmask32 mask) {
    return _mm512_maskz_cvtepi8_epi16(~0u, _mm256_maskz_loadu_epi8(mask, row));
  }
  static Sum plus_products(Sum sum, __m512i a, __m512i b) {
    return (Sum)_mm512_dpwssd_epi32((__m512i)sum, a, b);
  }
  static Sum plus(Sum a, Sum b) { return a + b; }
  static Vector floats(Sum sum) { return (Vector)_mm512_maskz_cvtepi32_ps(kAll, (__m512i)sum); }
  static __m512i round(Vector low, Vector high, float inverse) {
    const __m512i a = _mm512_maskz_cvtps_epi32(kAll, (__m512)(low * inverse));
    const __m512i b = _mm512_maskz_cvtps_epi32(kAll, (__m512)(high * inverse));
    const __m512i front = _mm512_castsi256_si512(_mm512_maskz_cvtsepi32_epi16(kAll, a));
    return _mm512_maskz_inserti64x4(kHalf, front, _mm512_maskz_cvtsepi32_epi16(kAll, b), 1);
  }
};

// The larger of numbers without a sign; NaN is larger than any.
inline Vector larger_bits(Vector a, Vector b) {
  return as<Vector>(_mm512_maskz_max_epi32(kAll, as<__m512i>(a), as<__m512i>(b)));
}

inline Vector magnitude(Vector v) { return as<Vector>(as<Words>(v) & 0x7fffffffu); }

// The units of four rows, from magnitudes of each. A unit has a finite inverse; NaN stays NaN.
inline Vector units_of(Vector a, Vector b, Vector c, Vector d) {
  constexpr float kLeast = 0x1p-100f;
  const Vector largest = reduce<larger_bits>(a, b, c, d);
  return larger_bits(largest, Vector{} + kLeast) / kLargest;
}

inline Vector load_part(const float* from, int64_t count) {
  return (Vector)_mm512_maskz_loadu_ps(static_cast<__mmask16>(first_of(count)), from);
}

inline int64_t vectors_of(int64_t width) { return (width + kPairs - 1) / kPairs; }

// Writes a query as words, in whole vectors; returns their unit.
template <class Products>
float pack_row(const float* q_D, __m512i* to, int64_t width) {
  float unit = 1.0f;
  if (Products::kScaled) {
    Vector largest = {};
    for (int64_t d = 0; d < width; d += kWords)
      largest = larger_bits(largest, magnitude(load_part(q_D + d, width - d)));
    unit = units_of(largest, largest, largest, largest)[0];
  }
  const float inverse = 1.0f / unit;
  for (int64_t d = 0; d < width; d += kPairs) {
    const Vector low = load_part(q_D + d, width - d);
    const Vector high = load_part(q_D + d + kWords, width - d - kWords);
    _mm512_store_si512(to + d / kPairs, Products::round(low, high, inverse));
  }
  return unit;
}

// Writes the weights of up to four rows of a tile, times the factors of its values if there are
// any, as words; rows are `stride` bytes apart. Lane m of the result is the unit of row m.
template <class Products, int Rows>
Vector pack_rows(const float* p_MJ, const float* factor_J, char* to, int64_t stride) {
  static_assert(kKeys == kPairs, "one vector holds the weights of a tile");
  Vector low[Rows], high[Rows], unit = Vector{} + 1.0f;
  KVG_UNROLL
  for (int m = 0; m < Rows; ++m) {
    low[m] = load(Float32{}, p_MJ + m * kKeys);
    high[m] = load(Float32{}, p_MJ + m * kKeys + kWords);
    if (factor_J)
      low[m] *= load(Float32{}, factor_J), high[m] *= load(Float32{}, factor_J + kWords);
  }
  if (Products::kScaled) {
    const auto largest = [&](int m) __attribute__((always_inline)) {
      m = m < Rows ? m : Rows - 1;
      return larger_bits(magnitude(low[m]), magnitude(high[m]));
    };
    unit = units_of(largest(0), largest(1), largest(2), largest(3));
  }
  const Vector inverse = 1.0f / unit;
  KVG_UNROLL
  for (int m = 0; m < Rows; ++m)
    _mm512_storeu_si512(to + m * stride, Products::round(low[m], high[m], inverse[m]));
  return unit;
}

template <class Products>
void pack_tile(const float* p_MJ, const float* factor_J, char* to, int64_t stride, float* unit_M,
               int64_t unit_stride, int64_t rows) {
  by_rows<4>(rows, [&](auto block, int64_t m) {
    const Vector units = pack_rows<Products, block.kCount>(p_MJ + m * kKeys, factor_J,
                                                           to + m * stride, stride);
    for (int i = 0; i < block.kCount; ++i) unit_M[(m + i) * unit_stride] = units[i];
  });
}
#endif

}  // namespace kvg::KVG_ISA
