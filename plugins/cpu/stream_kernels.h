// Scores and weighted sums of few query rows, four at a time, over K and V as they are stored, for
// kernels.cpp.
#pragma once

#include "cpu/word_products.h"

namespace kvg::KVG_ISA {

#if defined(__AVX512BF16__) && defined(__AVX512VNNI__)
constexpr int kQueries = 4, kTogether = 4;  // rows and keys of a block of scores

// Packed queries, in blocks of four rows: first the units of the rows, in the layout of a block of
// scores, then the words of each row in whole vectors.
inline int64_t block_size(int64_t width) { return kLine * (1 + kQueries * vectors_of(width)); }
inline int64_t packed_size(int64_t rows, int64_t width) {
  return (rows + kQueries - 1) / kQueries * block_size(width);
}

template <class Products>
void pack_query(const float* q_D, char* packed, int64_t row, int64_t width) {
  char* block = packed + row / kQueries * block_size(width);
  auto* words = reinterpret_cast<__m512i*>(block + kLine) + row % kQueries * vectors_of(width);
  const float unit = pack_row<Products>(q_D, words, width);
  auto* units = reinterpret_cast<float*>(block) + row % kQueries * kTogether;
  for (int j = 0; j < kTogether; ++j) units[j] = unit;
}

// Lane 4 m + j of the result: the sum of the lanes of sum[m][j], in the order of dot_block in
// tile_kernels.h: first within groups of four lanes, then across groups, each from the first on.
template <class Products, class Sum = typename Products::Sum>
[[gnu::always_inline]] inline Sum sums_of(const Sum (&sum)[kQueries][kTogether]) {
  const auto in_order = [](Sum a, Sum b, Sum c, Sum d) {
    return Products::plus(Products::plus(Products::plus(a, b), c), d);
  };
  Sum row[kQueries];
  KVG_UNROLL
  for (int m = 0; m < kQueries; ++m) {  // each group of lanes gets a sum per key
    const auto low = [&](int j) {
      return (__m512d)_mm512_maskz_unpacklo_ps(kAll, (__m512)sum[m][j], (__m512)sum[m][j + 1]);
    };
    const auto high = [&](int j) {
      return (__m512d)_mm512_maskz_unpackhi_ps(kAll, (__m512)sum[m][j], (__m512)sum[m][j + 1]);
    };
    row[m] = in_order((Sum)_mm512_maskz_unpacklo_pd(kHalf, low(0), low(2)),
                      (Sum)_mm512_maskz_unpackhi_pd(kHalf, low(0), low(2)),
                      (Sum)_mm512_maskz_unpacklo_pd(kHalf, high(0), high(2)),
                      (Sum)_mm512_maskz_unpackhi_pd(kHalf, high(0), high(2)));
  }
  const auto halves = [&](int m, int group) {  // groups `group` and `group` + 2 of two rows
    const __m512 a = (__m512)row[m], b = (__m512)row[m + 1];
    return group ? _mm512_maskz_shuffle_f32x4(kAll, a, b, 0xdd)
                 : _mm512_maskz_shuffle_f32x4(kAll, a, b, 0x88);
  };
  const auto group = [&](__m512 a, __m512 b, bool is_later) {
    return (Sum)(is_later ? _mm512_maskz_shuffle_f32x4(kAll, a, b, 0xdd)
                          : _mm512_maskz_shuffle_f32x4(kAll, a, b, 0x88));
  };
  const __m512 even[2] = {halves(0, 0), halves(2, 0)}, odd[2] = {halves(0, 1), halves(2, 1)};
  return in_order(group(even[0], even[1], false), group(odd[0], odd[1], false),
                  group(even[0], even[1], true), group(odd[0], odd[1], true));
}

// Computes the scores of four rows and kTogether keys. Vectors: those of a head, all whole; 0: any
// width.
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

// Index of the unit in the packed weights of a row, which are the words of a tile, then their unit.
constexpr int kUnit = kWords;

template <class Products>
void pack_weights(float* p_MJ, const float* factor_J, int64_t rows) {
  constexpr int64_t kStride = kKeys * sizeof(float);
  pack_tile<Products>(p_MJ, Products::kScaled ? factor_J : nullptr,
                      reinterpret_cast<char*>(p_MJ), kStride, p_MJ + kUnit, kKeys, rows);
}

// add_columns adds columns [e, e + kWide) of all keys, two keys at a time: their elements are
// interleaved, and the sums stay in registers. Sums of bfloat16 start from the outputs, in the
// order of the keys, so that no bit depends on the number of keys of a call.
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

// Bytes of K or V that a step reads.
template <class Products>
constexpr int64_t kStep = Products::kScaled ? 32768 : 16384;

template <class Products>
constexpr StreamKernels kStream = {kStep<Products>,        packed_size,
                                   pack_query<Products>,   pack_weights<Products>,
                                   stream_dot<Products>,   stream_add<Products>};
constexpr const StreamKernels* kStreamsBFloat16 = &kStream<BFloat16Products>;
constexpr const StreamKernels* kStreamsInt8 = &kStream<Int8Products>;
#else
constexpr const StreamKernels* kStreamsBFloat16 = nullptr;
constexpr const StreamKernels* kStreamsInt8 = nullptr;
#endif

}  // namespace kvg::KVG_ISA
