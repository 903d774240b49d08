// int4 weights, for linear_kernels.cpp: products of nibbles as they are stored, and nibbles as int8.
#pragma once

#include "cpu/linear_dot.h"
#include "cpu/vector.h"

// Rows up to which nibbles are unpacked for each tile; beyond, a pair of panels once for all rows.
#if KVG_NATIVE_DOT
#define KVG_NIBBLE_ROWS 8
#elif defined(__AVX2__) && !defined(__AVX512F__)
#define KVG_NIBBLE_ROWS 2
#else
#define KVG_NIBBLE_ROWS 0
#endif

namespace kvg::KVG_ISA {

constexpr int kNibbleRows = KVG_NIBBLE_ROWS;

#if defined(__AVX2__) && !defined(__AVX512F__)

// The multipliers of 8 columns of a group, from 8 bytes with two columns each.
inline __m256i multipliers(const uint8_t* from, int half) {
  const __m128i two = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(from));
  const __m128i most = _mm_set1_epi8(15);
  const __m128i low = _mm_and_si128(two, most);
  const __m128i less_one = _mm_unpacklo_epi8(low, _mm_and_si128(_mm_srli_epi16(two, 4), most));
  const __m128i each = _mm_add_epi8(less_one, _mm_set1_epi8(1));
  return _mm256_cvtepu8_epi32(half ? _mm_srli_si128(each, 8) : each);
}

// As `tile`, from nibbles as they are stored.
template <int Rows>
void tile_of_nibbles(const char* x, int64_t stride, const char* w, const uint8_t* multiplier,
                     int64_t groups, Index* out) {
  Index sums[Rows][kVectors] = {};
  for (int64_t g = 0; g < groups; ++g, multiplier += kColumns / 2) {
    __m256i group[Rows][kVectors] = {};
    KVG_UNROLL
    for (int i = 0; i < 4; ++i, x += 2 * Byte::kStep, w += kLineBytes) {
      __builtin_prefetch(w + kAhead * kLineBytes);
      KVG_UNROLL
      for (int v = 0; v < kVectors; ++v) {
        const auto both = read<__m256i>(w + v * (kLineBytes / kVectors));
        const __m256i parts[4] = {  // even and odd k of the first four, then of the second
            _mm256_srai_epi16(_mm256_slli_epi16(both, 12), 12),
            _mm256_srai_epi16(_mm256_slli_epi16(both, 4), 12),
            _mm256_srai_epi16(_mm256_slli_epi16(both, 8), 12), _mm256_srai_epi16(both, 12)};
        KVG_UNROLL
        for (int m = 0; m < Rows; ++m) {
          KVG_UNROLL
          for (int q = 0; q < 4; ++q) {
            const __m256i k = _mm256_set1_epi32(read<int32_t>(x + m * stride + 4 * q));
            group[m][v] = _mm256_add_epi32(group[m][v], _mm256_madd_epi16(parts[q], k));
          }
        }
      }
    }
    KVG_UNROLL
    for (int v = 0; v < kVectors; ++v) {
      const auto factor = as<Index>(multipliers(multiplier, v));
      KVG_UNROLL
      for (int m = 0; m < Rows; ++m) sums[m][v] += as<Index>(group[m][v]) * factor;
    }
  }
  KVG_UNROLL
  for (int m = 0; m < Rows; ++m) {
    KVG_UNROLL
    for (int v = 0; v < kVectors; ++v) out[m * kVectors + v] = sums[m][v];
  }
}

#endif

#if defined(__AVX512BW__)

// The multipliers of a group: 8 bytes with two columns each.
inline Index multipliers(const uint8_t* from) {
  const __m128i two = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(from));
  const __m128i low = _mm_and_si128(two, _mm_set1_epi8(15));
  const __m128i high = _mm_and_si128(_mm_srli_epi16(two, 4), _mm_set1_epi8(15));
  return as<Index>(_mm512_maskz_cvtepu8_epi32(0xffff, _mm_unpacklo_epi8(low, high))) + 1;
}

#endif

#if KVG_NATIVE_DOT

// As `tile`, from nibbles as they are stored. High nibbles are read as 16 times their value.
template <int Rows>
void tile_of_nibbles(const char* x, int64_t stride, const char* w, const uint8_t* multiplier,
                     int64_t groups, Index* out) {
  Index sums[Rows] = {};
  for (int64_t g = 0; g < groups; ++g, multiplier += kColumns / 2) {
    __m512i group[Rows] = {};
    KVG_UNROLL
    for (int i = 0; i < 4; ++i, x += 2 * Byte::kStep, w += kLineBytes) {
      __builtin_prefetch(w + kAhead * kLineBytes);
      const Words both = read<Words>(w);
      const __m512i first = as<__m512i>(both << 4 & 0xf0f0f0f0u);
      const __m512i second = as<__m512i>(both & 0xf0f0f0f0u);
      KVG_UNROLL
      for (int m = 0; m < Rows; ++m) {
        const char* at = x + m * stride;
        group[m] = _mm512_dpbusd_epi32(group[m], _mm512_set1_epi32(read<int32_t>(at)), first);
        group[m] =
            _mm512_dpbusd_epi32(group[m], _mm512_set1_epi32(read<int32_t>(at + 4)), second);
      }
    }
    const Index factor = multipliers(multiplier);
    KVG_UNROLL
    for (int m = 0; m < Rows; ++m) sums[m] += (as<Index>(group[m]) >> 4) * factor;
  }
  KVG_UNROLL
  for (int m = 0; m < Rows; ++m) out[m] = sums[m];
}

#endif

// A panel of nibbles as lines of int8, which nibble times multiplier is.
inline void expand(const char* w, const uint8_t* multiplier, int64_t groups, char* to) {
  for (int64_t g = 0; g < groups; ++g, multiplier += kColumns / 2) {
#if defined(__AVX512BW__)
    const Index wide = multipliers(multiplier);  // of a column's 32 bits, then of both halves
    const auto factor = as<__m512i>(wide | wide << 16);
    const __m512i byte = _mm512_set1_epi16(0xff);
    for (int i = 0; i < 4; ++i, w += kLineBytes) {
      __builtin_prefetch(w + kAhead * kLineBytes);
      const __m512i both = _mm512_loadu_si512(w);
      const auto join = [&](__m512i even, __m512i odd) {  // both hold 16 bits with the sign on top
        even = _mm512_mullo_epi16(_mm512_srai_epi16(even, 12), factor);
        odd = _mm512_mullo_epi16(_mm512_srai_epi16(odd, 12), factor);
        const __m512i line =
            _mm512_or_si512(_mm512_and_si512(even, byte), _mm512_slli_epi16(odd, 8));
        _mm512_storeu_si512(to, line);
        to += kLineBytes;
      };
      join(_mm512_slli_epi16(both, 12), _mm512_slli_epi16(both, 4));
      join(_mm512_slli_epi16(both, 8), both);
    }
#elif defined(__AVX2__)
    // As above, over half of the columns at a time.
    const __m256i byte = _mm256_set1_epi16(0xff);
    for (int half = 0; half < 2; ++half) {
      const __m256i wide = multipliers(multiplier, half);
      const __m256i factor = _mm256_or_si256(wide, _mm256_slli_epi32(wide, 16));
      const auto join = [&](__m256i even, __m256i odd, char* line) {
        even = _mm256_mullo_epi16(_mm256_srai_epi16(even, 12), factor);
        odd = _mm256_mullo_epi16(_mm256_srai_epi16(odd, 12), factor);
        const __m256i joined =
            _mm256_or_si256(_mm256_and_si256(even, byte), _mm256_slli_epi16(odd, 8));
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(line), joined);
      };
      for (int i = 0; i < 4; ++i) {
        const char* from = w + i * kLineBytes + half * 32;
        __builtin_prefetch(from + kAhead * kLineBytes);
        const auto both = read<__m256i>(from);
        char* line = to + i * 2 * kLineBytes + half * 32;
        join(_mm256_slli_epi16(both, 12), _mm256_slli_epi16(both, 4), line);
        join(_mm256_slli_epi16(both, 8), both, line + kLineBytes);
      }
    }
    w += 4 * kLineBytes, to += 8 * kLineBytes;
#else
    for (int i = 0; i < 4; ++i, w += kLineBytes, to += 2 * kLineBytes)
      for (int b = 0; b < kLineBytes; ++b) {
        const int factor = (multiplier[b / 8] >> (b / 4 % 2 * 4) & 15) + 1;
        const auto both = static_cast<int8_t>(w[b]);
        to[b] = static_cast<char>((static_cast<int8_t>(both << 4) >> 4) * factor);
        to[kLineBytes + b] = static_cast<char>((both >> 4) * factor);
      }
#endif
  }
}

}  // namespace kvg::KVG_ISA
