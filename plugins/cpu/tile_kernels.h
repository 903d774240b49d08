// Scores and weighted sums of query rows, over tiles of K and V that are packed first, for
// kernels.cpp. A step multiplies a broadcast pair of elements of a row by 16 columns, which are
// keys for scores and elements for outputs.
#pragma once

#include "cpu/word_products.h"

namespace kvg::KVG_ISA {

#if defined(__AVX512BF16__) && defined(__AVX512VNNI__)
// Table from float8_e4m3fn without its sign to bfloat16, which represents all its values.
struct Float8Words {
  alignas(64) uint16_t of[128];

  constexpr Float8Words() : of() {
    for (int x = 0; x < 128; ++x) {
      int exponent = (x >> 3) + 120, fraction = x & 7;
      if (x < 8) {  // subnormal: a multiple of 2^-9
        for (exponent = 121; fraction && fraction < 8; fraction *= 2) --exponent;
        fraction &= 7;
      }
      of[x] = static_cast<uint16_t>(x == 127 ? 0x7fc0 : x ? exponent << 7 | fraction << 4 : 0);
    }
  }
};
constexpr Float8Words kFloat8Words;

inline __m512i float8_words(const void* row, __mmask32 mask) {
  const auto table = [](int i) { return _mm512_load_si512(kFloat8Words.of + i * kPairs); };
  const __m512i x = _mm512_maskz_cvtepu8_epi16(~0u, _mm256_maskz_loadu_epi8(mask, row));
  const __m512i low = _mm512_permutex2var_epi16(table(0), x, table(1));
  const __m512i high = _mm512_permutex2var_epi16(table(2), x, table(3));
  const __mmask32 is_high = _mm512_test_epi16_mask(x, _mm512_set1_epi16(64));
  const __m512i sign = _mm512_and_si512(_mm512_slli_epi16(x, 8), _mm512_set1_epi16(-32768));
  return _mm512_or_si512(_mm512_mask_mov_epi16(low, is_high, high), sign);
}

inline __m512 float_of(__m256i words) {  // from bfloat16
  return _mm512_castsi512_ps(
      _mm512_maskz_slli_epi32(kAll, _mm512_maskz_cvtepu16_epi32(kAll, words), 16));
}

inline __m512 float_of(__m128i bytes) {  // from int8
  return _mm512_maskz_cvtepi32_ps(kAll, _mm512_maskz_cvtepi8_epi32(kAll, bytes));
}

// Loads 32 elements of a stored row as words. For bfloat16 products, int8 and float8 elements are
// multiplied by `factor`. Elements beyond the mask are 0.
template <class Products>
__m512i load_words(const void* row, int32_t dtype, int64_t at, float factor, __mmask32 mask) {
  const auto* bytes = static_cast<const char*>(row) + at;
  if constexpr (Products::kScaled) return Products::words(bytes, mask);
  if (dtype == KVG_BFLOAT16) return Products::words(static_cast<const uint16_t*>(row) + at, mask);
  if (dtype == KVG_FLOAT8_E4M3FN) {
    const __m512i words = float8_words(bytes, mask);
    if (factor == 1.0f) return words;
    return Products::round(
        (Vector)(float_of(_mm512_castsi512_si256(words)) * factor),
        (Vector)(float_of(_mm512_maskz_extracti64x4_epi64(kHalf, words, 1)) * factor), 1.0f);
  }
  if (dtype == KVG_INT8) {
    const __m256i all = _mm256_maskz_loadu_epi8(mask, bytes);
    return Products::round((Vector)(float_of(_mm256_castsi256_si128(all)) * factor),
                           (Vector)(float_of(_mm256_extracti128_si256(all, 1)) * factor), 1.0f);
  }
  const auto low = static_cast<__mmask16>(mask), high = static_cast<__mmask16>(mask >> kWords);
  const float* from = static_cast<const float*>(row) + at;
  return Products::round((Vector)_mm512_maskz_loadu_ps(low, from),
                         (Vector)_mm512_maskz_loadu_ps(high, from + kWords), 1.0f);
}

// Transposes 16 rows of 16 pairs of words.
inline void transpose(__m512i (&x)[kWords]) {
  __m512i y[kWords];
  KVG_UNROLL
  for (int i = 0; i < kWords; i += 2) {
    y[i] = _mm512_maskz_unpacklo_epi32(kAll, x[i], x[i + 1]);
    y[i + 1] = _mm512_maskz_unpackhi_epi32(kAll, x[i], x[i + 1]);
  }
  KVG_UNROLL
  for (int i = 0; i < kWords; i += 4) {  // x[i + c]: column c of each group of four, rows i to i + 3
    x[i] = _mm512_maskz_unpacklo_epi64(kHalf, y[i], y[i + 2]);
    x[i + 1] = _mm512_maskz_unpackhi_epi64(kHalf, y[i], y[i + 2]);
    x[i + 2] = _mm512_maskz_unpacklo_epi64(kHalf, y[i + 1], y[i + 3]);
    x[i + 3] = _mm512_maskz_unpackhi_epi64(kHalf, y[i + 1], y[i + 3]);
  }
  KVG_UNROLL
  for (int c = 0; c < 4; ++c) {
    const __m512i a = _mm512_maskz_shuffle_i32x4(kAll, x[c], x[4 + c], 0x88);  // groups 0 and 2
    const __m512i b = _mm512_maskz_shuffle_i32x4(kAll, x[8 + c], x[12 + c], 0x88);
    const __m512i d = _mm512_maskz_shuffle_i32x4(kAll, x[c], x[4 + c], 0xdd);  // groups 1 and 3
    const __m512i e = _mm512_maskz_shuffle_i32x4(kAll, x[8 + c], x[12 + c], 0xdd);
    y[c] = _mm512_maskz_shuffle_i32x4(kAll, a, b, 0x88);
    y[8 + c] = _mm512_maskz_shuffle_i32x4(kAll, a, b, 0xdd);
    y[4 + c] = _mm512_maskz_shuffle_i32x4(kAll, d, e, 0x88);
    y[12 + c] = _mm512_maskz_shuffle_i32x4(kAll, d, e, 0xdd);
  }
  KVG_UNROLL
  for (int i = 0; i < kWords; ++i) x[i] = y[i];
}

// Writes packed[pair of elements][key]; missing keys are 0.
template <class Products>
void pack_keys(const void* const* key_J, int32_t dtype, const float* const* scale_J, int64_t block,
               uint32_t* packed, int64_t width, int64_t keys) {
  for (int64_t d = 0; d < width; d += kPairs)
    for (int64_t first = 0; first < kKeys; first += kWords) {
      __m512i x[kWords];
      for (int64_t j = 0; j < kWords; ++j)
        x[j] = first + j < keys
                   ? load_words<Products>(key_J[first + j], dtype, d,
                                          scale_J ? scale_J[first + j][d / block] : 1.0f,
                                          first_of(width - d))
                   : _mm512_setzero_si512();
      transpose(x);
      for (int64_t p = 0; p < kWords; ++p)
        _mm512_storeu_si512(packed + (d / 2 + p) * kKeys + first, x[p]);
    }
}

inline int64_t padded(int64_t width) { return vectors_of(width) * kPairs; }

// Writes packed[pair of keys][element], in rows of padded(width).
template <class Products>
void pack_values(const void* const* value_J, int32_t dtype, const float* const* scale_J,
                 int64_t block, uint32_t* packed, int64_t width, int64_t keys) {
  for (int64_t j = 0; j < keys; j += 2, packed += padded(width))
    for (int64_t e = 0; e < width; e += kPairs) {
      const __mmask32 mask = first_of(width - e);
      __m512i pair[2] = {};
      for (int64_t i = 0; i < 2 && j + i < keys; ++i)
        pair[i] = load_words<Products>(value_J[j + i], dtype, e,
                                       scale_J ? scale_J[j + i][e / block] : 1.0f, mask);
      __m512i front, back;
      interleave(pair[0], pair[1], front, back);
      _mm512_storeu_si512(packed + e, front);
      _mm512_storeu_si512(packed + e + kWords, back);
    }
}

template <class Products>
float pack_query(const float* q_D, uint32_t* to, int64_t width) {
  return pack_row<Products>(q_D, reinterpret_cast<__m512i*>(to), width);
}

// Adds to the sums the products of one pair of elements of each row with the pairs of 32 columns.
// The rows' pairs are `stride` apart.
template <class Products, int Rows>
[[gnu::always_inline]] inline void add_products(typename Products::Sum (&sum)[Rows][2],
                                                const uint32_t* pair_M, int64_t stride,
                                                const uint32_t* columns) {
  const __m512i b[2] = {_mm512_loadu_si512(columns), _mm512_loadu_si512(columns + kWords)};
  KVG_UNROLL
  for (int m = 0; m < Rows; ++m) {
    const __m512i a = _mm512_maskz_set1_epi32(kAll, static_cast<int32_t>(pair_M[m * stride]));
    sum[m][0] = Products::plus_products(sum[m][0], a, b[0]);
    sum[m][1] = Products::plus_products(sum[m][1], a, b[1]);
  }
}

// Sets c to the sum over steps of a[m][step] . b[step], for 32 columns under the mask, times the
// unit of the row and the factor of each column. Add: adds the sum times the unit to c instead.
template <class Products, int Rows, bool Add>
void product_block(const uint32_t* a_MP, int64_t a_stride, const float* unit_M,
                   const uint32_t* b_PN, int64_t b_stride, const float* factor_N, float* c_MN,
                   int64_t c_stride, int64_t steps, __mmask32 mask) {
  const __mmask16 part[2] = {static_cast<__mmask16>(mask), static_cast<__mmask16>(mask >> kWords)};
  const auto c_of = [&](int m, int h) { return c_MN + m * c_stride + h * kWords; };
  typename Products::Sum sum[Rows][2] = {};
  if constexpr (Add && !Products::kScaled) {
    KVG_UNROLL
    for (int m = 0; m < Rows; ++m) {
      KVG_UNROLL
      for (int h = 0; h < 2; ++h) sum[m][h] = _mm512_maskz_loadu_ps(part[h], c_of(m, h));
    }
  }
  for (int64_t p = 0; p < steps; ++p)
    add_products<Products>(sum, a_MP + p, a_stride, b_PN + p * b_stride);
  KVG_UNROLL
  for (int m = 0; m < Rows; ++m) {
    KVG_UNROLL
    for (int h = 0; h < 2; ++h) {
      auto total = (__m512)Products::floats(sum[m][h]);
      if constexpr (Add && Products::kScaled)
        total = _mm512_maskz_loadu_ps(part[h], c_of(m, h)) + total * unit_M[m];
      if constexpr (!Add)
        total *= unit_M[m] * _mm512_maskz_loadu_ps(part[h], factor_N + h * kWords);
      _mm512_mask_storeu_ps(c_of(m, h), part[h], total);
    }
  }
}

// Computes the scores of a tile in the order in which stream_kernels.h sums the lanes of its
// vectors: lane l there has pairs l, l + 16, ..., and groups of four lanes are summed first.
template <class Products, int Rows>
void dot_block(const uint32_t* q_MP, const uint32_t* packed, const float* factor_J, float* s_MJ,
               int64_t vectors) {
  const int64_t stride = vectors * kWords;
  typename Products::Sum total[Rows][2] = {};
  for (int64_t first = 0; first < kWords; first += 4) {
    typename Products::Sum group[Rows][2] = {};
    for (int64_t lane = first; lane < first + 4; ++lane) {
      typename Products::Sum sum[Rows][2] = {};
      for (int64_t pair = lane; pair < stride; pair += kWords)
        add_products<Products>(sum, q_MP + pair, stride, packed + pair * kKeys);
      KVG_UNROLL
      for (int m = 0; m < Rows; ++m) {
        group[m][0] = lane == first ? sum[m][0] : Products::plus(group[m][0], sum[m][0]);
        group[m][1] = lane == first ? sum[m][1] : Products::plus(group[m][1], sum[m][1]);
      }
    }
    KVG_UNROLL
    for (int m = 0; m < Rows; ++m) {
      total[m][0] = first == 0 ? group[m][0] : Products::plus(total[m][0], group[m][0]);
      total[m][1] = first == 0 ? group[m][1] : Products::plus(total[m][1], group[m][1]);
    }
  }
  KVG_UNROLL
  for (int m = 0; m < Rows; ++m) {
    KVG_UNROLL
    for (int h = 0; h < 2; ++h) {
      auto scores = (__m512)Products::floats(total[m][h]);
      if (factor_J) scores *= _mm512_loadu_ps(factor_J + h * kWords);
      _mm512_storeu_ps(s_MJ + m * kKeys + h * kWords, scores);
    }
  }
}

template <class Products, bool Add>
void product(const uint32_t* a_MP, int64_t a_stride, const float* unit_M, const uint32_t* b_PN,
             int64_t b_stride, const float* factor_N, float* c_MN, int64_t c_stride, int64_t rows,
             int64_t steps, int64_t columns) {
  for (int64_t n = 0; n < columns; n += kPairs) {
    const __mmask32 mask = first_of(columns - n);
    const float* factors = factor_N ? factor_N + n : nullptr;
    by_rows<8>(rows, [&](auto block, int64_t m) {
      product_block<Products, block.kCount, Add>(a_MP + m * a_stride, a_stride, unit_M + m,
                                                 b_PN + n, b_stride, factors,
                                                 c_MN + m * c_stride + n, c_stride, steps, mask);
    });
  }
}

template <class Products>
void dot_tile(const uint32_t* q_MP, const float* unit_M, const uint32_t* packed,
              const float* factor_J, float* s_MJ, int64_t rows, int64_t width) {
  const int64_t stride = padded(width) / 2;
  if constexpr (Products::kScaled)  // exact in any order
    product<Products, false>(q_MP, stride, unit_M, packed, kKeys, factor_J, s_MJ, kKeys, rows,
                             (width + 1) / 2, kKeys);
  else
    by_rows<4>(rows, [&](auto block, int64_t m) {
      dot_block<Products, block.kCount>(q_MP + m * stride, packed, factor_J, s_MJ + m * kKeys,
                                        vectors_of(width));
    });
}

template <class Products>
void add_tile(const float* p_MJ, const uint32_t* packed, const float* factor_J, float* out_ME,
              int64_t rows, int64_t width, int64_t keys, int64_t step) {
  constexpr int64_t kPairsOfKeys = kKeys / 2, kRounded = 32;
  alignas(64) uint32_t pairs[kRounded][kPairsOfKeys];
  float units[kRounded];
  for (int64_t first = 0; first < rows; first += kRounded) {
    const int64_t count = rows - first < kRounded ? rows - first : kRounded;
    pack_tile<Products>(p_MJ + first * kKeys, factor_J, reinterpret_cast<char*>(pairs),
                        sizeof pairs[0], units, 1, count);
    for (int64_t j = 0; j < keys; j += step)
      product<Products, true>(pairs[0] + j / 2, kPairsOfKeys, units,
                              packed + j / 2 * padded(width), padded(width), nullptr,
                              out_ME + first * width, width, count,
                              ((keys - j < step ? keys - j : step) + 1) / 2, width);
  }
}

template <class Products>
constexpr TileKernels kTile = {pack_keys<Products>,  pack_values<Products>, pack_query<Products>,
                               dot_tile<Products>,   add_tile<Products>};
constexpr const TileKernels* kTilesBFloat16 = &kTile<BFloat16Products>;
constexpr const TileKernels* kTilesInt8 = &kTile<Int8Products>;
#else
constexpr const TileKernels* kTilesBFloat16 = nullptr;
constexpr const TileKernels* kTilesInt8 = nullptr;
#endif

}  // namespace kvg::KVG_ISA
