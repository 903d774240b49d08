// Vectors of 16-bit words, for the products of pairs of them.
#pragma once

#include <cstdint>

#if defined(__AVX512BW__)
#include <immintrin.h>
#endif

namespace kvg::KVG_ISA {

#if defined(__AVX512BW__)
constexpr int kPairs = 32;  // words of one vector
constexpr int kWords = 16;  // pairs of words, or float32, of one vector

// Indices that interleave the elements of two vectors, a0 b0 a1 b1 ...: those of the first half of
// the result, then those of the second.
struct Interleaving {
  alignas(64) uint16_t half[2][kPairs];

  constexpr Interleaving() : half() {
    for (int i = 0; i < 2 * kPairs; ++i)
      half[i / kPairs][i % kPairs] = static_cast<uint16_t>(i / 2 + i % 2 * kPairs);
  }
};
constexpr Interleaving kInterleaving;

inline void interleave(__m512i a, __m512i b, __m512i& front, __m512i& back) {
  front = _mm512_permutex2var_epi16(a, _mm512_load_si512(kInterleaving.half[0]), b);
  back = _mm512_permutex2var_epi16(a, _mm512_load_si512(kInterleaving.half[1]), b);
}

inline __mmask32 first_of(int64_t count) {
  return count >= kPairs ? 0xffffffffu : count > 0 ? (1u << count) - 1 : 0;
}

// Masks of all lanes: without masks, GCC 12 warns about its own headers.
constexpr __mmask16 kAll = 0xffff;
constexpr __mmask8 kHalf = 0xff;

#endif

}  // namespace kvg::KVG_ISA
