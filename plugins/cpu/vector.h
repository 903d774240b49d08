// float32 vectors in the compiler's own extension, and functions of them for the kernels.
// Written for GCC and Clang on any processor. Compiled once per instruction set (kernels.cpp).
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__F16C__)
#include <immintrin.h>
#endif

#include "cpu/element.h"

#if defined(__clang__)
#define KVG_UNROLL _Pragma("clang loop unroll(full)")
#else
#define KVG_UNROLL _Pragma("GCC unroll 16")
#endif

// The lanes of two vectors at even (odd) places: for each group of four lanes, those of the first
// vector, then those of the second.
#if defined(__AVX512F__)
#define KVG_LANES 16
#define KVG_EVEN 0, 2, 16, 18, 4, 6, 20, 22, 8, 10, 24, 26, 12, 14, 28, 30
#define KVG_ODD 1, 3, 17, 19, 5, 7, 21, 23, 9, 11, 25, 27, 13, 15, 29, 31
#else
#define KVG_LANES 8
#define KVG_EVEN 0, 2, 8, 10, 4, 6, 12, 14
#define KVG_ODD 1, 3, 9, 11, 5, 7, 13, 15
#endif

#if defined(__clang__)
#define KVG_SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define KVG_SHUFFLE(a, b, ...) __builtin_shuffle(a, b, Index{__VA_ARGS__})
#endif

namespace kvg::KVG_ISA {

constexpr int kLanes = KVG_LANES;

// Calls block(Rows<Most>{}, m) for Most rows at a time, then block(Rows<1>{}, m) for each row left.
template <int Count>
struct Rows {
  static constexpr int kCount = Count;
};

template <int Most, class Block>
inline __attribute__((always_inline)) void by_rows(int64_t rows, Block&& block) {
  int64_t m = 0;
  for (; m + Most <= rows; m += Most) block(Rows<Most>{}, m);
  for (; m < rows; ++m) block(Rows<1>{}, m);
}

using Vector = float __attribute__((vector_size(kLanes * 4)));
using Index = int32_t __attribute__((vector_size(kLanes * 4)));
using Words = uint32_t __attribute__((vector_size(kLanes * 4)));
using Halves = uint16_t __attribute__((vector_size(kLanes * 2)));

inline void save(float* to, Vector v) { std::memcpy(to, &v, sizeof v); }

// kLanes consecutive elements as float32.
inline Vector load(Float32, const float* from) {
  Vector v;
  std::memcpy(&v, from, sizeof v);
  return v;
}

inline Vector load(BFloat16, const uint16_t* from) {
  Vector v;
#if defined(__AVX512F__)  // the conversion below does not become this one instruction
  const auto* row = reinterpret_cast<const __m256i*>(from);
  const __m512i wide = _mm512_maskz_cvtepu16_epi32(0xffff, _mm256_loadu_si256(row));
  const __m512i bits = _mm512_maskz_slli_epi32(0xffff, wide, 16);
#elif defined(__AVX2__)
  const __m128i row = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
  const __m256i bits = _mm256_slli_epi32(_mm256_cvtepu16_epi32(row), 16);
#else
  Halves stored;
  std::memcpy(&stored, from, sizeof stored);
  const Words bits = __builtin_convertvector(stored, Words) << 16;
#endif
  std::memcpy(&v, &bits, sizeof v);
  return v;
}

inline Vector load(Float16, const uint16_t* from) {
  Vector v;
#if defined(__AVX512F__)
  const auto* row = reinterpret_cast<const __m256i*>(from);
  const __m512 x = _mm512_maskz_cvtph_ps(0xffff, _mm256_loadu_si256(row));
  std::memcpy(&v, &x, sizeof v);
#elif defined(__F16C__)
  const __m256 x = _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
  std::memcpy(&v, &x, sizeof v);
#else
  for (int i = 0; i < kLanes; ++i) v[i] = Float16::decode(from[i]);
#endif
  return v;
}

inline Vector load(Int8, const int8_t* from) {
  Vector v;
#if defined(__AVX512F__)
  const __m128i row = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
  const __m512 x = _mm512_maskz_cvtepi32_ps(0xffff, _mm512_maskz_cvtepi8_epi32(0xffff, row));
  std::memcpy(&v, &x, sizeof v);
#elif defined(__AVX2__)
  const __m128i row = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(from));
  const __m256 x = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(row));
  std::memcpy(&v, &x, sizeof v);
#else
  for (int i = 0; i < kLanes; ++i) v[i] = Int8::decode(from[i]);
#endif
  return v;
}

inline Index lane_numbers() {
#if defined(__AVX512F__)
  return Index{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
#else
  return Index{0, 1, 2, 3, 4, 5, 6, 7};
#endif
}

inline Vector plus(Vector a, Vector b) { return a + b; }
inline Vector larger(Vector a, Vector b) { return a > b ? a : b; }

// Reduces four vectors at once: lane i of the result is the join of all lanes of the i-th. Two
// rounds join neighbours within groups of four lanes, so that each group has a part of all four.
template <Vector (*Join)(Vector, Vector)>
Vector reduce(Vector a, Vector b, Vector c, Vector d) {
  const Vector ab = Join(KVG_SHUFFLE(a, b, KVG_EVEN), KVG_SHUFFLE(a, b, KVG_ODD));
  const Vector cd = Join(KVG_SHUFFLE(c, d, KVG_EVEN), KVG_SHUFFLE(c, d, KVG_ODD));
  Vector v = Join(KVG_SHUFFLE(ab, cd, KVG_EVEN), KVG_SHUFFLE(ab, cd, KVG_ODD));
#if defined(__AVX512F__)
  v = Join(v, KVG_SHUFFLE(v, v, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7));
  v = Join(v, KVG_SHUFFLE(v, v, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11));
#else
  v = Join(v, KVG_SHUFFLE(v, v, 4, 5, 6, 7, 0, 1, 2, 3));
#endif
  return v;
}

// to[i] = the sum of the lanes of the i-th vector.
inline void sums(Vector a, Vector b, Vector c, Vector d, float* to) {
  const Vector v = reduce<plus>(a, b, c, d);
  std::memcpy(to, &v, 4 * sizeof(float));
}

inline float sum(Vector v) {
  float four[4];
  sums(v, v, v, v, four);
  return four[0];
}

template <class To, class From>
To as(From v) {
  static_assert(sizeof(To) == sizeof(From), "same bits");
  To to;
  std::memcpy(&to, &v, sizeof to);
  return to;
}

// A number as the nearest integer, in the low bits of `shifted`, and the rest, in [-1/2, 1/2].
template <class Floats>
struct Split {
  Floats shifted, left;
};

template <class Floats>
Split<Floats> split(Floats x) {
  constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it leaves the nearest integer
  const Floats shifted = x + kRound;
  return {shifted, x - (shifted - kRound)};
}

// 2^x for x <= 0, to 2e-7 relative; below 2^-126: 0. NaN stays NaN. The polynomial is a minimax fit
// of 2^f on [-1/2, 1/2] (relative error 1.9e-9). Floats and Bits have one lane or several.
template <class Floats, class Bits>
Floats exp2_from_bits(Floats x) {
  const auto [shifted, f] = split(x < -126.0f ? Floats{} - 126.0f : x);
  Floats p = f * 1.534581160e-4f + 1.339993122e-3f;
  p = p * f + 9.618488959e-3f;
  p = p * f + 5.550328777e-2f;
  p = p * f + 2.402264689e-1f;
  p = p * f + 6.931472057e-1f;
  p = p * f + 1.000000001f;
  const Floats power = as<Floats>((as<Bits>(shifted) + 127u) << 23);
  return x < -126.0f ? Floats{} : p * power;
}

inline float exp2_of_negative(float x) { return exp2_from_bits<float, uint32_t>(x); }
inline Vector exp2_of_negative(Vector x) { return exp2_from_bits<Vector, Words>(x); }

// tanh to 3e-7 relative. Near 0 a minimax fit of (tanh(x)/x - 1)/x^2 on [0, 0.625], else by 2^x.
inline Vector tanh_of(Vector x) {
  const Vector a = as<Vector>(as<Words>(x) & 0x7fffffffu), z = x * x;
  Vector p = z * 2.298670577e-3f - 8.349717959e-3f;
  p = p * z + 2.177088286e-2f;
  p = p * z - 5.395953108e-2f;
  p = p * z + 1.333330485e-1f;
  p = p * z - 3.333333318e-1f;
  const Vector near = x + x * (z * p);
  const Vector e = exp2_of_negative(-2.885390082f * a);  // exp(-2 |x|)
  const Vector far = (1.0f - e) / (1.0f + e);
  const Vector signed_far = as<Vector>(as<Words>(far) | (as<Words>(x) & 0x80000000u));
  return a < 0.625f ? near : signed_far;
}

}  // namespace kvg::KVG_ISA
