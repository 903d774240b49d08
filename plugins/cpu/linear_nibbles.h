// int4 weights, for linear_kernels.cpp: products of nibbles as stored, and conversion to int8.
#pragma once

#include "cpu/linear_dot.h"
#include "cpu/vector.h"

// Most rows for which nibbles are multiplied as they are stored; for more, a pair of panels is
// converted to int8 once for all rows. With AVX2 but without native dot products, products of bytes
// serve any number of rows, which are then int8, with a start value of each group's sums.
#if KVG_NATIVE_DOT
#define KVG_NIBBLE_ROWS 8
#elif defined(__AVX2__)
#define KVG_NIBBLE_ROWS INT64_MAX
#else
#define KVG_NIBBLE_ROWS 0
#endif
#define KVG_NIBBLE_BYTES (KVG_NIBBLE_ROWS == INT64_MAX)

namespace kvg::KVG_ISA {

#if KVG_NIBBLE_ROWS

constexpr int kNibbleTileRows = kLanes < 16 ? 6 : 8;

// The multipliers of kLanes columns of a group, from 8 bytes with two columns each.
inline Index multipliers(const uint8_t* from, int vector) {
  const __m128i two = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(from));
  const __m128i low = _mm_and_si128(two, _mm_set1_epi8(15));
  const __m128i high = _mm_and_si128(_mm_srli_epi16(two, 4), _mm_set1_epi8(15));
  const __m128i less_one = _mm_unpacklo_epi8(low, high);
#if defined(__AVX512F__)
  (void)vector;
  return as<Index>(_mm512_maskz_cvtepu8_epi32(0xffff, less_one)) + 1;
#else
  return as<Index>(_mm256_cvtepu8_epi32(vector ? _mm_srli_si128(less_one, 8) : less_one)) + 1;
#endif
}

#endif

#if KVG_NIBBLE_BYTES

using Shorts = uint16_t __attribute__((vector_size(kLanes * 4)));

// The sum of the two products of each pair of bytes, which must fit 16 bits.
inline Shorts products(Words unsigned_bytes, Index signed_bytes) {
#if defined(__AVX512F__)
  return as<Shorts>(
      _mm512_maddubs_epi16(as<__m512i>(unsigned_bytes), as<__m512i>(signed_bytes)));
#else
  return as<Shorts>(
      _mm256_maddubs_epi16(as<__m256i>(unsigned_bytes), as<__m256i>(signed_bytes)));
#endif
}

// The sum of the two products of each pair of signed shorts.
inline Index products(Shorts a, Shorts b) {
#if defined(__AVX512F__)
  return as<Index>(_mm512_madd_epi16(as<__m512i>(a), as<__m512i>(b)));
#else
  return as<Index>(_mm256_madd_epi16(as<__m256i>(a), as<__m256i>(b)));
#endif
}

inline Index everywhere(const char* from) { return Index{} + read<int32_t>(from); }

// Forces `sum` into a register here. Otherwise GCC computes products of several rows before it adds
// them, for which AVX2 has too few registers, and spills some.
template <class Sum>
inline void settle(Sum& sum) {
#if defined(__AVX2__) && !defined(__AVX512F__)
  asm volatile("" : "+x"(sum));
#else
  (void)sum;
#endif
}

// Computes the sums of Rows rows and one panel; rows of `out` are `width` apart. Nibbles are
// multiplied as 0 to 15, 8 more than their value, which the start values correct. Intermediate sums
// may wrap around, a group's final sums do not: a group has 16 products in each half of a column's
// word, each at most 8 * 127.
template <int Rows>
void tile_of_nibbles(const char* first_x, int64_t stride, const char* w, const uint8_t* multiplier,
                     int64_t groups, Index* out, int width) {
  const char* start = first_x + groups * kGroup;
  RowsAt<Rows> x(first_x, stride);
  Index sums[Rows][kVectors] = {};
  for (int64_t g = 0; g < groups; ++g, multiplier += kColumns / 2, start += sizeof(int32_t)) {
    Shorts group[Rows][kVectors];
    KVG_UNROLL
    for (int m = 0; m < Rows; ++m) {
      KVG_UNROLL
      for (int v = 0; v < kVectors; ++v) group[m][v] = as<Shorts>(everywhere(start + m * stride));
    }
    KVG_UNROLL
    for (int i = 0; i < 4; ++i, x += 8, w += kLineBytes) {
      __builtin_prefetch(w + kAhead * kLineBytes);
      Words first[kVectors], second[kVectors];
      KVG_UNROLL
      for (int v = 0; v < kVectors; ++v) {
        const Words both = read<Words>(w + v * (kLineBytes / kVectors)) ^ 0x88888888u;
        first[v] = both & 0x0f0f0f0fu, second[v] = both >> 4 & 0x0f0f0f0fu;
      }
      KVG_UNROLL
      for (int m = 0; m < Rows; ++m) {
        const Index low = everywhere(x[m]), high = everywhere(x[m] + 4);
        KVG_UNROLL
        for (int v = 0; v < kVectors; ++v) {
          group[m][v] += products(first[v], low);
          group[m][v] += products(second[v], high);
          settle(group[m][v]);
        }
      }
    }
    KVG_UNROLL
    for (int v = 0; v < kVectors; ++v) {
      const Index factor = multipliers(multiplier, v);
      KVG_UNROLL
      for (int m = 0; m < Rows; ++m)
        sums[m][v] += products(group[m][v], as<Shorts>(factor | factor << 16));
    }
  }
  KVG_UNROLL
  for (int m = 0; m < Rows; ++m) {
    KVG_UNROLL
    for (int v = 0; v < kVectors; ++v) out[m * width + v] = sums[m][v];
  }
}

// Writes the start values of a row's group sums, which follow its `depth` bytes: in each half of a
// word, -8 times the sum of its inputs.
inline void add_starts(const int8_t* x, int64_t depth, char* to) {
  for (int64_t first = 0; first < depth; first += kGroup, to += sizeof(int32_t)) {
    int16_t halves[2] = {};
    for (int64_t k = first; k < first + kGroup; ++k)
      halves[k / 2 % 2] = static_cast<int16_t>(halves[k / 2 % 2] - 8 * x[k]);
    std::memcpy(to, halves, sizeof halves);
  }
}

#endif

#if KVG_NATIVE_DOT

// Does what the version above does, without start values: nibbles are signed, and multiplied as the
// high bits of bytes, which are 16 times their value.
template <int Rows>
void tile_of_nibbles(const char* first_x, int64_t stride, const char* w, const uint8_t* multiplier,
                     int64_t groups, Index* out, int width) {
  RowsAt<Rows> x(first_x, stride);
  Index sums[Rows] = {};
  for (int64_t g = 0; g < groups; ++g, multiplier += kColumns / 2) {
    __m512i group[Rows] = {};
    KVG_UNROLL
    for (int i = 0; i < 4; ++i, x += 2 * Byte::kStep, w += kLineBytes) {
      prefetch<waits_for_lines(Rows), 96>(w);
      const Words both = read<Words>(w);
      const __m512i first = as<__m512i>(both << 4 & 0xf0f0f0f0u);
      const __m512i second = as<__m512i>(both & 0xf0f0f0f0u);
      KVG_UNROLL
      for (int m = 0; m < Rows; ++m) {
        const char* at = x[m];
        group[m] = _mm512_dpbusd_epi32(group[m], _mm512_set1_epi32(read<int32_t>(at)), first);
        group[m] =
            _mm512_dpbusd_epi32(group[m], _mm512_set1_epi32(read<int32_t>(at + 4)), second);
      }
    }
    const Index factor = multipliers(multiplier, 0);
    KVG_UNROLL
    for (int m = 0; m < Rows; ++m) {  // unsigned: sums of x + kOffset may wrap around
      const Index more = (as<Index>(group[m]) >> 4) * factor;
      sums[m] = as<Index>(as<Words>(sums[m]) + as<Words>(more));
    }
  }
  KVG_UNROLL
  for (int m = 0; m < Rows; ++m) out[m * width] = sums[m];
}

#endif

#if !KVG_NIBBLE_BYTES

// Converts a panel of nibbles to lines of int8: nibble times multiplier.
inline void expand(const char* w, const uint8_t* multiplier, int64_t groups, char* to) {
  for (int64_t g = 0; g < groups; ++g, multiplier += kColumns / 2) {
#if KVG_NATIVE_DOT
    const Index wide = multipliers(multiplier, 0);  // in a column's 32 bits, then in both halves
    const auto factor = as<__m512i>(wide | wide << 16);
    const __m512i byte = _mm512_set1_epi16(0xff);
    for (int i = 0; i < 4; ++i, w += kLineBytes) {
      __builtin_prefetch(w + kAhead * kLineBytes);
      const __m512i both = _mm512_loadu_si512(w);
      const auto join = [&](__m512i even, __m512i odd) {  // a nibble in the top 4 of 16 bits
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

#endif

}  // namespace kvg::KVG_ISA
