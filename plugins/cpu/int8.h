// Attention of few query rows over int8 keys and values, in integers (AVX512-VNNI).
//
// Why: turning each int8 element into a float costs more than reading it from memory. So the other
// side of each product becomes an integer, once for many keys: a query row int16, a row of weights
// two int8 digits. Both keep more bits than bfloat16 and float16 have, and sums of products are
// exact; scales are applied to scores and weights, never to elements.
//
// Part of kernels.cpp: compiled once per instruction set.
#pragma once

#include <cstring>

#include "cpu/kernels.h"
#include "cpu/vector.h"

namespace kvg::KVG_ISA {

#if defined(__AVX512VNNI__)

inline __mmask64 first_bytes(int64_t count) {
  return count >= 64 ? ~__mmask64{0} : (__mmask64{1} << (count < 0 ? 0 : count)) - 1;
}

// to[m][j] = the sum of the lanes of parts[m][j]: sixteen sums at once, as sums() makes four.
template <int Rows>
__attribute__((always_inline)) inline __m512i sums_of(const __m512i (&parts)[Rows][4]) {
  Index v[4];
  KVG_UNROLL
  for (int m = 0; m < 4; ++m) {
    const Index a = (Index)parts[m % Rows][0], b = (Index)parts[m % Rows][1];
    const Index c = (Index)parts[m % Rows][2], d = (Index)parts[m % Rows][3];
    const Index ab = KVG_SHUFFLE(a, b, KVG_EVEN) + KVG_SHUFFLE(a, b, KVG_ODD);
    const Index cd = KVG_SHUFFLE(c, d, KVG_EVEN) + KVG_SHUFFLE(c, d, KVG_ODD);
    v[m] = KVG_SHUFFLE(ab, cd, KVG_EVEN) + KVG_SHUFFLE(ab, cd, KVG_ODD);
  }
#define KVG_FRONT 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23
#define KVG_BACK 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31
#define KVG_FIRST 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27
#define KVG_SECOND 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31
  const Index ab = KVG_SHUFFLE(v[0], v[1], KVG_FRONT) + KVG_SHUFFLE(v[0], v[1], KVG_BACK);
  const Index cd = KVG_SHUFFLE(v[2], v[3], KVG_FRONT) + KVG_SHUFFLE(v[2], v[3], KVG_BACK);
  return (__m512i)(KVG_SHUFFLE(ab, cd, KVG_FIRST) + KVG_SHUFFLE(ab, cd, KVG_SECOND));
}

// Rows x 4 dot products. Width 0: any, as `width` tells; else the loop is unrolled whole.
template <int Rows, int Width>
void dot_int8_block(const int16_t* q_MD, const int8_t* const (&keys)[4], __m512 factors, bool more,
                    float* s_MJ, int64_t width, int64_t stride) {
  constexpr int64_t kWords = 32;  // of one vector
  __m512i parts[Rows][4];
  KVG_UNROLL
  for (int m = 0; m < Rows; ++m) {
    KVG_UNROLL
    for (int j = 0; j < 4; ++j) parts[m][j] = _mm512_setzero_si512();
  }
  const int64_t end = Width ? Width : width;
#pragma GCC unroll 4
  for (int64_t d = 0; d < end; d += kWords) {
    const auto mask = static_cast<__mmask32>(Width ? ~0u : first_bytes(width - d));
    __m512i k[4];
    KVG_UNROLL
    for (int j = 0; j < 4; ++j)
      k[j] = _mm512_cvtepi8_epi16(_mm256_maskz_loadu_epi8(mask, keys[j] + d));
    KVG_UNROLL
    for (int m = 0; m < Rows; ++m) {
      const __m512i q = _mm512_maskz_loadu_epi16(mask, q_MD + m * stride + d);
      KVG_UNROLL
      for (int j = 0; j < 4; ++j) parts[m][j] = _mm512_dpwssd_epi32(parts[m][j], q, k[j]);
    }
  }
  const __m512 scores = _mm512_maskz_cvtepi32_ps(0xffff, sums_of(parts)) * factors;
  const auto all = static_cast<__mmask8>(0xff);
  const __m128 rows[4] = {_mm512_maskz_extractf32x4_ps(all, scores, 0),
                          _mm512_maskz_extractf32x4_ps(all, scores, 1),
                          _mm512_maskz_extractf32x4_ps(all, scores, 2),
                          _mm512_maskz_extractf32x4_ps(all, scores, 3)};
  KVG_UNROLL
  for (int m = 0; m < Rows; ++m) {
    float* to = s_MJ + m * kKeys;
    _mm_storeu_ps(to, more ? _mm_loadu_ps(to) + rows[m] : rows[m]);
  }
}

template <int Rows>
void dot_int8_rows(const int16_t* q_MD, const void* const* key_J, const float* factor_J, bool more,
                   float* s_MJ, int64_t width, int64_t stride, int64_t keys) {
  for (int64_t j = 0; j < keys; j += 4) {
    const int8_t* four[4];
    KVG_UNROLL
    for (int i = 0; i < 4; ++i)
      four[i] = static_cast<const int8_t*>(key_J[j + i < keys ? j + i : j]);
    const auto mask = static_cast<__mmask8>(first_bytes(keys - j));
    const __m128 factor = _mm_maskz_loadu_ps(mask, factor_J + j);
    const __m512 factors = _mm512_maskz_broadcast_f32x4(0xffff, factor);
    if (width == 128)
      dot_int8_block<Rows, 128>(q_MD, four, factors, more, s_MJ + j, width, stride);
    else if (width == 64)
      dot_int8_block<Rows, 64>(q_MD, four, factors, more, s_MJ + j, width, stride);
    else
      dot_int8_block<Rows, 0>(q_MD, four, factors, more, s_MJ + j, width, stride);
  }
}

inline void dot_int8(const int16_t* q_MD, const void* const* key_J, const float* factor_J,
                     bool more, float* s_MJ, int64_t rows, int64_t width, int64_t stride,
                     int64_t keys) {
  for (; rows > 0; rows -= 4, q_MD += 4 * stride, s_MJ += 4 * kKeys) {
    const auto run = rows >= 4   ? dot_int8_rows<4>
                     : rows == 3 ? dot_int8_rows<3>
                     : rows == 2 ? dot_int8_rows<2>
                                 : dot_int8_rows<1>;
    run(q_MD, key_J, factor_J, more, s_MJ, width, stride, keys);
  }
}

// A row of weights as round(weight / scale) = 256 high + low, four keys to a word as vpdpbusd takes
// them. `bias` undoes that values are read with 128 added.
struct Digits {
  int32_t high[kKeys / 4], low[kKeys / 4], bias;
  float scale;
};

inline void split(const float* p_J, const float* factor_J, int64_t keys, Digits* to) {
  constexpr float kLargest = 127 * 256;
  const __m512 none = _mm512_setzero_ps();
  __m512 p[2], most = none;
  __mmask16 unordered = 0;
  for (int i = 0; i < 2; ++i) {
    const auto mask = static_cast<__mmask16>(first_bytes(keys - i * 16));
    p[i] = _mm512_maskz_loadu_ps(mask, p_J + i * 16) * _mm512_maskz_loadu_ps(mask, factor_J + i * 16);
    unordered |= _mm512_cmp_ps_mask(p[i] - p[i], none, _CMP_UNORD_Q);  // NaN or infinity
    most = _mm512_maskz_max_ps(0xffff, most, _mm512_abs_ps(p[i]));
  }
  const __m256 half = _mm256_max_ps(_mm512_maskz_extractf32x8_ps(0xff, most, 0),
                                    _mm512_maskz_extractf32x8_ps(0xff, most, 1));
  __m128 four = _mm_max_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
  four = _mm_max_ps(four, _mm_movehl_ps(four, four));
  const float largest = _mm_cvtss_f32(_mm_max_ss(four, _mm_movehdup_ps(four)));
  const float inverse = kLargest / largest;
  const float factor = unordered || largest == 0 ? 0 : inverse < 1e38f ? inverse : 1e38f;
  to->scale = unordered ? __builtin_nanf("") : factor == 0 ? 0 : 1 / factor;
  __m512i total = _mm512_setzero_si512();
  for (int i = 0; i < 2; ++i) {
    const auto kept = static_cast<__mmask16>(unordered ? 0 : 0xffff);
    const __m512i w = _mm512_maskz_cvtps_epi32(kept, p[i] * _mm512_set1_ps(factor));
    const __m512i rounded = _mm512_add_epi32(w, _mm512_set1_epi32(128));
    const __m512i high = _mm512_maskz_srai_epi32(0xffff, rounded, 8);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to->high + i * 4),
                     _mm512_maskz_cvtepi32_epi8(0xffff, high));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to->low + i * 4),
                     _mm512_maskz_cvtepi32_epi8(0xffff, w));  // the low byte is the low digit
    total = _mm512_add_epi32(total, w);
  }
  to->bias = -128 * sum((Index)total);
}

constexpr int64_t kColumns = 64;  // of values that are taken together

// Four keys' bytes of kColumns columns, column by column, with 128 added. to[i] holds columns
// 4 i .. 4 i + 3 of each sixteen.
inline void interleave(const void* const* value_J, int64_t first, int64_t keys, int64_t e,
                       __mmask64 mask, __m512i* to) {
  __m512i v[4];
  KVG_UNROLL
  for (int j = 0; j < 4; ++j) {
    const void* from = value_J[first + j < keys ? first + j : first];  // its weight is 0
    v[j] = _mm512_maskz_loadu_epi8(mask, static_cast<const int8_t*>(from) + e);
    v[j] = _mm512_xor_si512(v[j], _mm512_set1_epi8(-128));
  }
  const __m512i ab = _mm512_unpacklo_epi8(v[0], v[1]), AB = _mm512_unpackhi_epi8(v[0], v[1]);
  const __m512i cd = _mm512_unpacklo_epi8(v[2], v[3]), CD = _mm512_unpackhi_epi8(v[2], v[3]);
  to[0] = _mm512_unpacklo_epi16(ab, cd), to[1] = _mm512_unpackhi_epi16(ab, cd);
  to[2] = _mm512_unpacklo_epi16(AB, CD), to[3] = _mm512_unpackhi_epi16(AB, CD);
}

// Groups of four columns back in order: the inverse of what interleave() leaves.
inline void reorder(__m512 x[4]) {
  const __m512i a[4] = {(__m512i)x[0], (__m512i)x[1], (__m512i)x[2], (__m512i)x[3]};
  const __m512i p = _mm512_maskz_shuffle_i32x4(0xffff, a[0], a[1], 0x44);  // 00 01 10 11
  const __m512i q = _mm512_maskz_shuffle_i32x4(0xffff, a[2], a[3], 0x44);
  const __m512i r = _mm512_maskz_shuffle_i32x4(0xffff, a[0], a[1], 0xee);
  const __m512i s = _mm512_maskz_shuffle_i32x4(0xffff, a[2], a[3], 0xee);
  x[0] = (__m512)_mm512_maskz_shuffle_i32x4(0xffff, p, q, 0x88);
  x[1] = (__m512)_mm512_maskz_shuffle_i32x4(0xffff, p, q, 0xdd);
  x[2] = (__m512)_mm512_maskz_shuffle_i32x4(0xffff, r, s, 0x88);
  x[3] = (__m512)_mm512_maskz_shuffle_i32x4(0xffff, r, s, 0xdd);
}

template <int Rows>
void add_int8_block(const Digits* digits_M, const __m512i* values, float* out_ME, int64_t stride,
                    int64_t keys, __mmask64 mask) {
  __m512i high[Rows][4], low[Rows][4];
  KVG_UNROLL
  for (int m = 0; m < Rows; ++m) {
    KVG_UNROLL
    for (int i = 0; i < 4; ++i) {
      high[m][i] = _mm512_setzero_si512();
      low[m][i] = _mm512_set1_epi32(digits_M[m].bias);
    }
  }
  for (int64_t j = 0; j < keys; j += 4) {
    KVG_UNROLL
    for (int m = 0; m < Rows; ++m) {
      const __m512i upper = _mm512_set1_epi32(digits_M[m].high[j / 4]);
      const __m512i lower = _mm512_set1_epi32(digits_M[m].low[j / 4]);
      KVG_UNROLL
      for (int i = 0; i < 4; ++i) {
        high[m][i] = _mm512_dpbusd_epi32(high[m][i], values[j + i], upper);
        low[m][i] = _mm512_dpbusd_epi32(low[m][i], values[j + i], lower);
      }
    }
  }
  KVG_UNROLL
  for (int m = 0; m < Rows; ++m) {
    __m512 parts[4];
    KVG_UNROLL
    for (int i = 0; i < 4; ++i)
      parts[i] = _mm512_maskz_cvtepi32_ps(
          0xffff, _mm512_add_epi32(_mm512_maskz_slli_epi32(0xffff, high[m][i], 8), low[m][i]));
    reorder(parts);
    KVG_UNROLL
    for (int i = 0; i < 4; ++i) {
      const auto part = static_cast<__mmask16>(mask >> i * 16);
      float* to = out_ME + m * stride + i * 16;
      const __m512 out = _mm512_maskz_loadu_ps(part, to);
      _mm512_mask_storeu_ps(to, part, out + parts[i] * _mm512_set1_ps(digits_M[m].scale));
    }
  }
}

inline void add_int8(const float* p_MJ, const void* const* value_J, const float* factor_J,
                     float* out_ME, int64_t rows, int64_t width, int64_t stride, int64_t keys) {
  constexpr int kMost = 8;  // rows that share values in order
  __m512i values[kKeys];
  Digits digits[kMost];
  for (int64_t first = 0; first < rows; first += kMost) {
    const int64_t count = rows - first < kMost ? rows - first : kMost;
    for (int64_t m = 0; m < count; ++m) split(p_MJ + (first + m) * kKeys, factor_J, keys, digits + m);
    for (int64_t e = 0; e < width; e += kColumns) {
      const __mmask64 mask = first_bytes(width - e);
      for (int64_t j = 0; j < keys; j += 4) interleave(value_J, j, keys, e, mask, values + j);
      float* out = out_ME + first * stride + e;
      int64_t m = 0;
      for (; m + 2 <= count; m += 2)
        add_int8_block<2>(digits + m, values, out + m * stride, stride, keys, mask);
      if (m < count) add_int8_block<1>(digits + m, values, out + m * stride, stride, keys, mask);
    }
  }
}
#else
constexpr decltype(Kernels::dot_int8) dot_int8 = nullptr;
constexpr decltype(Kernels::add_int8) add_int8 = nullptr;
#endif

}  // namespace kvg::KVG_ISA
