// Codes of 4 or 8 bits as the numbers that they stand for, and their products with a row's inputs,
// for linear_groups.h.
//
// With AVX2 alone, codes become bytes, and bytes become floats at the top of a word. So numbers are
// 2^24 to 2^28 times those of the codes, and prepared rows are divided by this factor: unit_of.
#pragma once

#include "cpu/linear_dot.h"
#include "cpu/vector.h"

#if defined(__AVX2__) && !defined(__AVX512F__)
#define KVG_CODE_BYTES 1
#else
#define KVG_CODE_BYTES 0
#endif

namespace kvg::KVG_ISA {

// Number of inputs of each column in a line.
constexpr int64_t line_inputs(int64_t codes) { return 32 / code_bits(codes); }

constexpr float kFp4[16] = {0.0f,  0.5f,  1.0f,  1.5f,  2.0f,  3.0f,  4.0f,  6.0f,
                            -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f};

// Levels of GGUF's IQ4_NL: kvalues_iq4nl in ggml-common.h.
constexpr float kIq4Levels[16] = {-127, -104, -83, -65, -49, -35, -22, -10,
                                  1,    13,   25,  38,  53,  69,  89,  113};

constexpr float number(int64_t codes, uint32_t nibble) {
  if (codes == kIq4) return kIq4Levels[nibble];
  if (codes == kE2m1 || codes == kNvfp4) return kFp4[nibble];
  return static_cast<float>(nibble) - (nibble < 8 ? 0.0f : 16.0f);
}

// The number that stands for 1 in Numbers<Codes>.
constexpr float unit_of(int64_t codes) {
  if (!KVG_CODE_BYTES || codes == kE4m3) return 1.0f;
  if (codes == kE2m1 || codes == kNvfp4) return 0x1p25f;
  return codes == kInt8 || codes == kIq4 ? 0x1p24f : 0x1p28f;
}

// The numbers of the 16 codes, over and over, in 64 bytes: floats, bfloat16, or bytes of integers,
// where FP4 numbers count twice.
template <class Element, int64_t Codes>
struct Table {
  static constexpr uint32_t kCount = 64 / sizeof(Element);
  alignas(64) Element at[kCount] = {};

  constexpr Table() {
    for (uint32_t i = 0; i < kCount; ++i) {
      const float exact = number(Codes, i % 16);
      if constexpr (sizeof(Element) == 4) at[i] = exact;
      if constexpr (sizeof(Element) == 2)
        at[i] = static_cast<Element>(__builtin_bit_cast(uint32_t, exact) >> 16);
      if constexpr (sizeof(Element) == 1)
        at[i] = static_cast<Element>(exact * (Codes == kIq4 ? 1 : 2));
    }
  }
};

template <class Element, int64_t Codes>
inline constexpr Table<Element, Codes> kTable{};

// The E4M3 numbers in the top bytes of words: 2^(e - 7) * (1 + m / 8), or 2^-6 * m / 8 if e is 0.
inline Vector of_e4m3(Words on_top) {
  const Words size = on_top & 0x7f000000u;
  const auto normal = as<Vector>((size >> 4) + (120u << 23));
  const Vector small = normal * 2.0f - 0x1p-6f;  // the smaller one if e is 0, else the larger one
  const Vector found = small < normal ? small : normal;
  return as<Vector>(as<Words>(found) | (on_top & 0x80000000u));
}

// ---- parts of a line: numbers of all columns, and their products with a row's inputs ------------

#if KVG_NATIVE_DOT

constexpr int kPartInputs = 2;
constexpr int64_t kInputBytes = 2;  // bytes of an input in a prepared row

using Shorts = uint16_t __attribute__((vector_size(64)));
using SignedShorts = int16_t __attribute__((vector_size(64)));

// A float16 made of the bits of an E4M3 number is smaller than it by this factor.
constexpr float kHalfUnit = 256.0f;
constexpr float kScaleUnit = kHalfUnit;  // factor that NVFP4's scales lack

template <int64_t Codes>
struct Numbers {
  static constexpr float kUnit = 1.0f;  // factor that a part lacks
  // Bfloat16 numbers, twice: the fifth bit of an index does not matter.
  __m512i table = _mm512_load_si512(kTable<uint16_t, Codes>.at);

  __m512i part(const char* line, int i) const {
    return _mm512_permutexvar_epi16(as<__m512i>(read<Shorts>(line) >> (4 * i)), table);
  }
};

template <>
struct Numbers<kE4m3> {
  static constexpr float kUnit = kHalfUnit;

  __m512i part(const char* line, int i) const {
    const Shorts top = read<Shorts>(line) << (8 - 8 * i);
    const auto halves = as<__m512i>((top & 0x8000) | ((top & 0x7f00) >> 1));
    const __m512 low = _mm512_cvtph_ps(_mm512_castsi512_si256(halves));
    const __m512 high = _mm512_cvtph_ps(_mm512_extracti64x4_epi64(halves, 1));
    return as<__m512i>(_mm512_cvtne2ps_pbh(high, low));
  }
};

template <>
struct Numbers<kInt8> {
  static constexpr float kUnit = 1.0f;

  __m512i part(const char* line, int i) const {
    const auto halves = as<__m512i>(as<SignedShorts>(read<Shorts>(line) << (8 - 8 * i)) >> 8);
    const __m512i low = _mm512_cvtepi16_epi32(_mm512_castsi512_si256(halves));
    const __m512i high = _mm512_cvtepi16_epi32(_mm512_extracti64x4_epi64(halves, 1));
    return as<__m512i>(_mm512_cvtne2ps_pbh(_mm512_cvtepi32_ps(high), _mm512_cvtepi32_ps(low)));
  }
};

constexpr int code_of(int, int i) { return i; }

inline Vector add(Vector sum, const char* x, __m512i part) {
  const __m512i pair = _mm512_set1_epi32(read<int32_t>(x));
  return as<Vector>(_mm512_dpbf16_ps(as<__m512>(sum), as<__m512bh>(pair), as<__m512bh>(part)));
}

inline float input(const char* x, int64_t k) { return BFloat16::decode(read<uint16_t>(x + 2 * k)); }

#else

constexpr int kPartInputs = 1;
constexpr int64_t kInputBytes = 4;
constexpr float kScaleUnit = 1.0f;

#if KVG_CODE_BYTES

// The signed byte b of each word, times 2^24.
inline Vector of_byte(Words words, int b) {
  if (b == 3) return __builtin_convertvector(as<Index>(words & 0xff000000u), Vector);
  const Words from = {0, 4, 8, 12, 0, 4, 8, 12}, zeros = Words{} + 0x808080u;
  const Words to_top = (from + static_cast<uint32_t>(b)) << 24 | zeros;
  const auto top = _mm256_shuffle_epi8(as<__m256i>(words), as<__m256i>(to_top));
  return __builtin_convertvector(as<Index>(top), Vector);
}

template <int64_t Codes>
struct Numbers {
  static constexpr float kUnit = 1.0f;
  __m256i table = read<__m256i>(reinterpret_cast<const char*>(kTable<int8_t, Codes>.at));

  // Four codes of each word become bytes; integers are their high halves.
  Vector part(const char* line, int i) const {
    const auto words = read<Words>(line);
    if (Codes == kIntegers) return of_byte((i % 2 ? words : words << 4) & 0xf0f0f0f0u, i / 2);
    const Words index = (i % 2 ? words >> 4 : words) & 0x0f0f0f0fu;
    return of_byte(as<Words>(_mm256_shuffle_epi8(table, as<__m256i>(index))), i / 2);
  }
};

#else

template <int64_t Codes>
struct Numbers {
  static constexpr float kUnit = 1.0f;
#if defined(__AVX512F__)
  __m512 table = _mm512_load_ps(kTable<float, Codes>.at);

  Vector part(const char* line, int i) const {
    return as<Vector>(_mm512_permutexvar_ps(as<__m512i>(read<Words>(line) >> (4 * i)), table));
  }
#else
  Vector part(const char* line, int i) const {
    const Words index = read<Words>(line) >> (4 * i) & 15u;
    Vector found;
    for (int lane = 0; lane < kLanes; ++lane) found[lane] = number(Codes, index[lane]);
    return found;
  }
#endif
};

#endif

template <>
struct Numbers<kE4m3> {
  static constexpr float kUnit = 1.0f;

  Vector part(const char* line, int i) const {
    return of_e4m3(read<Words>(line) << (24 - 8 * i));
  }
};

template <>
struct Numbers<kInt8> {
  static constexpr float kUnit = 1.0f;

  Vector part(const char* line, int i) const {
#if KVG_CODE_BYTES
    return of_byte(read<Words>(line), i);
#else
    const Words on_top = read<Words>(line) << (24 - 8 * i);
    return __builtin_convertvector(as<Index>(on_top) >> 24, Vector);
#endif
  }
};

// The code of input i of a column's word, whose halves have `each` codes.
constexpr int code_of(int each, int i) { return i % 2 * each + i / 2; }

inline Vector add(Vector sum, const char* x, Vector part) { return sum + part * read<float>(x); }

inline float input(const char* x, int64_t k) { return read<float>(x + 4 * k); }

#endif

}  // namespace kvg::KVG_ISA
