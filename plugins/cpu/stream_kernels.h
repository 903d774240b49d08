// Scores and weighted sums of few query rows, over K and V as they lie, for kernels.cpp.
//
// Four query rows at a time, in products of pairs of 16-bit words: of bfloat16 with sums in float32,
// or of integers, where queries and weights are multiples of a unit of their own, their largest by
// 32767, and sums are exact.
#pragma once

#include "cpu/kernels.h"
#include "cpu/vector.h"
#include "cpu/words.h"

namespace kvg::KVG_ISA {

#if defined(__AVX512BF16__) && defined(__AVX512VNNI__)
constexpr int kQueries = 4, kTogether = 4;  // rows and keys of a block of scores
constexpr float kLargest = 32767.0f;

struct BFloat16Products {
  using Word = uint16_t;
  using Sum = __m512;
  static constexpr bool kScaled = false;  // by a unit, and a factor for each key
  static constexpr int64_t kStep = 16384;

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
  using Sum = __m512i;
  static constexpr bool kScaled = true;
  static constexpr int64_t kStep = 32768;

  static __m512i words(const void* row, __mmask32 mask) {
    return _mm512_maskz_cvtepi8_epi16(~0u, _mm256_maskz_loadu_epi8(mask, row));
  }
  static Sum plus_products(Sum sum, __m512i a, __m512i b) {
    return _mm512_dpwssd_epi32(sum, a, b);
  }
  static Sum plus(Sum a, Sum b) { return _mm512_maskz_add_epi32(kAll, a, b); }
  static Vector floats(Sum sum) { return (Vector)_mm512_maskz_cvtepi32_ps(kAll, sum); }
  static __m512i round(Vector low, Vector high, float unit) {
    const float inverse = 1.0f / unit;
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

inline float unit_of(Vector largest) {
  return reduce<larger_bits>(largest, largest, largest, largest)[0] / kLargest;
}

inline Vector load_part(const float* from, int64_t count) {
  return (Vector)_mm512_maskz_loadu_ps(static_cast<__mmask16>(first_of(count)), from);
}

// Packed queries: of four rows first their units, as scores lie, then the words of each in whole
// vectors.
inline int64_t vectors_of(int64_t width) { return (width + kPairs - 1) / kPairs; }
inline int64_t block_size(int64_t width) { return kLine * (1 + kQueries * vectors_of(width)); }
inline int64_t packed_size(int64_t rows, int64_t width) {
  return (rows + kQueries - 1) / kQueries * block_size(width);
}

template <class Products>
void pack_query(const float* q_D, char* packed, int64_t row, int64_t width) {
  char* block = packed + row / kQueries * block_size(width);
  float unit = 1.0f;
  if (Products::kScaled) {
    Vector largest = {};
    for (int64_t d = 0; d < width; d += kWords)
      largest = larger_bits(largest, magnitude(load_part(q_D + d, width - d)));
    unit = unit_of(largest);
  }
  auto* units = reinterpret_cast<float*>(block) + row % kQueries * kTogether;
  for (int j = 0; j < kTogether; ++j) units[j] = unit;
  auto* words = reinterpret_cast<__m512i*>(block + kLine) + row % kQueries * vectors_of(width);
  for (int64_t d = 0; d < width; d += kPairs) {
    const Vector low = load_part(q_D + d, width - d);
    const Vector high = load_part(q_D + d + kWords, width - d - kWords);
    _mm512_store_si512(words + d / kPairs, Products::round(low, high, unit));
  }
}

// Lane 4 m + j: the sum of the lanes of sum[m][j]. First within groups of four lanes, then across.
template <class Products, class Sum = typename Products::Sum>
[[gnu::always_inline]] inline Sum sums_of(const Sum (&sum)[kQueries][kTogether]) {
  const auto lanes = [](Sum a, Sum b) {
    return Products::plus((Sum)_mm512_maskz_unpacklo_ps(kAll, (__m512)a, (__m512)b),
                          (Sum)_mm512_maskz_unpackhi_ps(kAll, (__m512)a, (__m512)b));
  };
  const auto pairs = [](Sum a, Sum b) {
    return Products::plus((Sum)_mm512_maskz_unpacklo_pd(kHalf, (__m512d)a, (__m512d)b),
                          (Sum)_mm512_maskz_unpackhi_pd(kHalf, (__m512d)a, (__m512d)b));
  };
  const auto groups = [](Sum a, Sum b) {
    return Products::plus((Sum)_mm512_maskz_shuffle_f32x4(kAll, (__m512)a, (__m512)b, 0x88),
                          (Sum)_mm512_maskz_shuffle_f32x4(kAll, (__m512)a, (__m512)b, 0xdd));
  };
  Sum row[kQueries];
  KVG_UNROLL
  for (int m = 0; m < kQueries; ++m)
    row[m] = pairs(lanes(sum[m][0], sum[m][1]), lanes(sum[m][2], sum[m][3]));
  return groups(groups(row[0], row[1]), groups(row[2], row[3]));
}

// Scores of four rows and kTogether keys. Vectors: of a head, all of them whole; 0: of any width.
template <class Products, int Vectors>
void dot_keys(const char* packed, const Stream& keys, int64_t first, float* s_MJ, int64_t rows,
              int64_t width) {
  using Word = typename Products::Word;
  typename Products::Sum sum[kQueries][kTogether] = {};
  const Word* key[kTogether];
  KVG_UNROLL
  for (int j = 0; j < kTogether; ++j)
    key[j] = reinterpret_cast<const Word*>(keys.row_J[first + j] + keys.offset);
  const auto* q = reinterpret_cast<const __m512i*>(packed + kLine);
  const int64_t stride = Vectors ? Vectors : vectors_of(width);
  constexpr auto kSize = static_cast<int64_t>(sizeof(Word));
  Ahead& ahead = *keys.ahead;
  const auto step = [&](int64_t i, __mmask32 mask) __attribute__((always_inline)) {
    __m512i k[kTogether];
    KVG_UNROLL
    for (int j = 0; j < kTogether; ++j) k[j] = Products::words(key[j] + i * kPairs, mask);
    ahead.ask(kTogether * kPairs * kSize / kLine);
    KVG_UNROLL
    for (int m = 0; m < kQueries; ++m) {
      const __m512i row = _mm512_load_si512(q + m * stride + i);
      KVG_UNROLL
      for (int j = 0; j < kTogether; ++j) sum[m][j] = Products::plus_products(sum[m][j], row, k[j]);
    }
  };
  if constexpr (Vectors > 0) {
    KVG_UNROLL
    for (int i = 0; i < Vectors; ++i) step(i, ~0u);
  } else {
    for (int64_t i = 0; i < stride; ++i) step(i, first_of(width - i * kPairs));
  }
  Vector scores = Products::floats(sums_of<Products>(sum));
  if (Products::kScaled) {
    const __m128 factors = _mm_loadu_ps(keys.factor_J + first);
    scores *= load(Float32{}, reinterpret_cast<const float*>(packed)) *
              (Vector)_mm512_maskz_broadcast_f32x4(kAll, factors);
  }
  float rows_of[kQueries][kTogether];
  std::memcpy(rows_of, &scores, sizeof rows_of);
  KVG_UNROLL
  for (int m = 0; m < kQueries; ++m) {
    if (m >= rows) break;
    std::memcpy(s_MJ + m * kKeys + first, rows_of[m], sizeof rows_of[m]);
  }
}

template <class Products>
void stream_dot(const char* packed, const Stream& keys, float* s_MJ, int64_t rows, int64_t width,
                int64_t count) {
  auto* dot = dot_keys<Products, 0>;
  if (width == 2 * kPairs) dot = dot_keys<Products, 2>;
  if (width == 4 * kPairs) dot = dot_keys<Products, 4>;
  for (int64_t m = 0; m < rows; m += kQueries, packed += block_size(width))
    for (int64_t j = 0; j < count; j += kTogether)
      dot(packed, keys, j, s_MJ + m * kKeys, rows - m, width);
}

// Packed weights of a row: the words of a tile, then their unit.
constexpr int kUnit = kWords;

template <class Products>
void pack_weights(float* p_MJ, const float* factor_J, int64_t rows) {
  for (int64_t m = 0; m < rows; ++m, p_MJ += kKeys) {
    Vector low = load(Float32{}, p_MJ), high = load(Float32{}, p_MJ + kWords);
    float unit = 1.0f;
    if (Products::kScaled) {
      low *= load(Float32{}, factor_J), high *= load(Float32{}, factor_J + kWords);
      unit = unit_of(larger_bits(magnitude(low), magnitude(high)));
    }
    _mm512_storeu_si512(p_MJ, Products::round(low, high, unit));
    p_MJ[kUnit] = unit;
  }
}

// Columns [e, e + kWide) of all keys, two keys at a time: elements of both lie side by side, and
// the sums stay in registers. Sums of bfloat16 go on from the outputs, in the order of the keys, so
// that no bit depends on how many come at once.
constexpr int kWide = 64;

template <class Products, int Rows>
void add_columns(const float* p_MJ, const Stream& values, float* out_ME, int64_t width,
                 int64_t first, int64_t keys, int64_t e) {
  using Word = typename Products::Word;
  constexpr auto kSize = static_cast<int64_t>(sizeof(Word));
  constexpr int kHalves = kWide / kPairs;
  typename Products::Sum sum[Rows][2 * kHalves] = {};
  __mmask32 mask[kHalves];
  KVG_UNROLL
  for (int h = 0; h < kHalves; ++h) mask[h] = first_of(width - e - h * kPairs);
  const auto part_of = [&](int h) { return static_cast<__mmask16>(mask[h / 2] >> h % 2 * kWords); };
  const auto out_of = [&](int m, int h) { return out_ME + m * width + e + h * kWords; };
  if constexpr (!Products::kScaled) {
    KVG_UNROLL
    for (int m = 0; m < Rows; ++m) {
      KVG_UNROLL
      for (int h = 0; h < 2 * kHalves; ++h)
        sum[m][h] = _mm512_maskz_loadu_ps(part_of(h), out_of(m, h));
    }
  }
  Ahead& ahead = *values.ahead;
  const int64_t from = values.offset + e * kSize;
  for (int64_t j = 0; j < keys; j += 2) {
    const auto* a = reinterpret_cast<const Word*>(values.row_J[j] + from);
    const auto* b = reinterpret_cast<const Word*>(values.row_J[j + 1] + from);
    ahead.ask(2 * kWide * kSize / kLine);
    __m512i v[2 * kHalves];
    KVG_UNROLL
    for (int h = 0; h < kHalves; ++h)
      interleave(Products::words(a + h * kPairs, mask[h]), Products::words(b + h * kPairs, mask[h]),
                 v[2 * h], v[2 * h + 1]);
    KVG_UNROLL
    for (int m = 0; m < Rows; ++m) {
      const auto* pairs = reinterpret_cast<const int32_t*>(p_MJ + m * kKeys);
      const __m512i p = _mm512_maskz_set1_epi32(kAll, pairs[(first + j) / 2]);
      KVG_UNROLL
      for (int h = 0; h < 2 * kHalves; ++h) sum[m][h] = Products::plus_products(sum[m][h], p, v[h]);
    }
  }
  KVG_UNROLL
  for (int m = 0; m < Rows; ++m) {
    KVG_UNROLL
    for (int h = 0; h < 2 * kHalves; ++h) {
      auto total = (__m512)Products::floats(sum[m][h]);
      if constexpr (Products::kScaled)
        total = _mm512_maskz_loadu_ps(part_of(h), out_of(m, h)) + total * p_MJ[m * kKeys + kUnit];
      _mm512_mask_storeu_ps(out_of(m, h), part_of(h), total);
    }
  }
}

template <class Products>
void stream_add(const float* p_MJ, const Stream& values, float* out_ME, int64_t rows, int64_t width,
                int64_t first, int64_t count) {
  by_rows<kQueries>(rows, [&](auto block, int64_t m) {
    for (int64_t e = 0; e < width; e += kWide)
      add_columns<Products, block.kCount>(p_MJ + m * kKeys, values, out_ME + m * width, width,
                                          first, count, e);
  });
}

template <class Products>
constexpr StreamKernels kStream = {Products::kStep,        packed_size,
                                   pack_query<Products>,   pack_weights<Products>,
                                   stream_dot<Products>,   stream_add<Products>};
constexpr const StreamKernels* kStreamsBFloat16 = &kStream<BFloat16Products>;
constexpr const StreamKernels* kStreamsInt8 = &kStream<Int8Products>;
#else
constexpr const StreamKernels* kStreamsBFloat16 = nullptr;
constexpr const StreamKernels* kStreamsInt8 = nullptr;
#endif

}  // namespace kvg::KVG_ISA
