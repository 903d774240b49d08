// Scores and weighted sums of many query rows in bfloat16, with sums in float32, for kernels.cpp.
//
// A tile of keys is packed once, so that a step is one broadcast of two elements of a row times 16
// columns: keys of a score, elements of an output.
#pragma once

#include "cpu/kernels.h"
#include "cpu/vector.h"
#include "cpu/words.h"

namespace kvg::KVG_ISA {

#if defined(__AVX512BF16__)
static_assert(kKeys == kPairs, "one vector holds the weights of a tile");

inline __m512 floats_of(__m128i bytes) {
  return _mm512_maskz_cvtepi32_ps(kAll, _mm512_maskz_cvtepi8_epi32(kAll, bytes));
}

// 32 elements of a stored row as bfloat16; those beyond the mask: 0.
inline __m512i load_pairs(const void* row, int32_t dtype, int64_t at, float factor, __mmask32 mask) {
  const auto low = static_cast<__mmask16>(mask), high = static_cast<__mmask16>(mask >> kWords);
  __m512 a, b;
  if (dtype == KVG_BFLOAT16) {
    return _mm512_maskz_loadu_epi16(mask, static_cast<const uint16_t*>(row) + at);
  } else if (dtype == KVG_INT8) {
    const __m256i bytes = _mm256_maskz_loadu_epi8(mask, static_cast<const int8_t*>(row) + at);
    a = floats_of(_mm256_castsi256_si128(bytes));
    b = floats_of(_mm256_extracti128_si256(bytes, 1));
    a *= factor, b *= factor;
  } else {
    a = _mm512_maskz_loadu_ps(low, static_cast<const float*>(row) + at);
    b = _mm512_maskz_loadu_ps(high, static_cast<const float*>(row) + at + kWords);
  }
  return (__m512i)_mm512_cvtne2ps_pbh(b, a);
}

// Rows of 16 words become columns.
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

// packed[pair of elements][key]; keys that are not there: 0.
inline void pack_keys(const void* const* key_J, int32_t dtype, const float* factor_J,
                      uint32_t* packed, int64_t width, int64_t keys) {
  for (int64_t d = 0; d < width; d += kPairs)
    for (int64_t first = 0; first < kKeys; first += kWords) {
      __m512i x[kWords];
      for (int64_t j = 0; j < kWords; ++j) {
        const int64_t key = first + j;
        x[j] = key < keys ? load_pairs(key_J[key], dtype, d, factor_J ? factor_J[key] : 1.0f,
                                       first_of(width - d))
                          : _mm512_setzero_si512();
      }
      transpose(x);
      for (int64_t p = 0; p < kWords; ++p)
        _mm512_storeu_si512(packed + (d / 2 + p) * kKeys + first, x[p]);
    }
}

inline int64_t padded(int64_t width) { return (width + kPairs - 1) / kPairs * kPairs; }

// packed[pair of keys][element], rows of padded(width).
inline void pack_values(const void* const* value_J, int32_t dtype, const float* factor_J,
                        uint32_t* packed, int64_t width, int64_t keys) {
  for (int64_t j = 0; j < keys; j += 2, packed += padded(width))
    for (int64_t e = 0; e < width; e += kPairs) {
      const __mmask32 mask = first_of(width - e);
      __m512i pair[2] = {};
      for (int64_t i = 0; i < 2 && j + i < keys; ++i)
        pair[i] = load_pairs(value_J[j + i], dtype, e, factor_J ? factor_J[j + i] : 1.0f, mask);
      __m512i front, back;
      interleave(pair[0], pair[1], front, back);
      _mm512_storeu_si512(packed + e, front);
      _mm512_storeu_si512(packed + e + kWords, back);
    }
}

// c = (Add: c +) sum over steps of a[m][step] . b[step], for 32 columns under the mask.
template <int Rows, bool Add>
void product_block(const uint32_t* a_MP, int64_t a_stride, const uint32_t* b_PN, int64_t b_stride,
                   float* c_MN, int64_t c_stride, int64_t steps, __mmask32 mask) {
  const auto low = static_cast<__mmask16>(mask), high = static_cast<__mmask16>(mask >> kWords);
  __m512 sum[Rows][2] = {};
  if constexpr (Add) {
    KVG_UNROLL
    for (int m = 0; m < Rows; ++m) {
      sum[m][0] = _mm512_maskz_loadu_ps(low, c_MN + m * c_stride);
      sum[m][1] = _mm512_maskz_loadu_ps(high, c_MN + m * c_stride + kWords);
    }
  }
  for (int64_t p = 0; p < steps; ++p) {
    const __m512bh b0 = (__m512bh)_mm512_loadu_si512(b_PN + p * b_stride);
    const __m512bh b1 = (__m512bh)_mm512_loadu_si512(b_PN + p * b_stride + kWords);
    KVG_UNROLL
    for (int m = 0; m < Rows; ++m) {
      const auto pair = static_cast<int32_t>(a_MP[m * a_stride + p]);
      const __m512bh a = (__m512bh)_mm512_maskz_set1_epi32(kAll, pair);
      sum[m][0] = _mm512_dpbf16_ps(sum[m][0], a, b0);
      sum[m][1] = _mm512_dpbf16_ps(sum[m][1], a, b1);
    }
  }
  KVG_UNROLL
  for (int m = 0; m < Rows; ++m) {
    _mm512_mask_storeu_ps(c_MN + m * c_stride, low, sum[m][0]);
    _mm512_mask_storeu_ps(c_MN + m * c_stride + kWords, high, sum[m][1]);
  }
}

template <bool Add>
void product(const uint32_t* a_MP, int64_t a_stride, const uint32_t* b_PN, int64_t b_stride,
             float* c_MN, int64_t c_stride, int64_t rows, int64_t steps, int64_t columns) {
  for (int64_t n = 0; n < columns; n += kPairs) {
    const __mmask32 mask = first_of(columns - n);
    const uint32_t* b = b_PN + n;
    by_rows<8>(rows, [&](auto block, int64_t m) {
      product_block<block.kCount, Add>(a_MP + m * a_stride, a_stride, b, b_stride,
                                       c_MN + m * c_stride + n, c_stride, steps, mask);
    });
  }
}

inline void dot_packed(const uint32_t* q_MP, const uint32_t* packed, float* s_MJ, int64_t rows,
                       int64_t pairs) {
  product<false>(q_MP, pairs, packed, kKeys, s_MJ, kKeys, rows, pairs, kKeys);
}

inline void add_packed(const float* p_MJ, const uint32_t* packed, float* out_ME, int64_t rows,
                       int64_t width, int64_t keys) {
  constexpr int64_t kSteps = kKeys / 2, kRounded = 32;
  alignas(64) uint32_t pairs[kRounded][kSteps];
  for (int64_t first = 0; first < rows; first += kRounded) {
    const int64_t count = rows - first < kRounded ? rows - first : kRounded;
    for (int64_t m = 0; m < count; ++m)
      _mm512_store_si512(pairs[m],
                         load_pairs(p_MJ + (first + m) * kKeys, KVG_FLOAT32, 0, 1.0f, ~0u));
    product<true>(pairs[0], kSteps, packed, padded(width), out_ME + first * width, width, count,
                  (keys + 1) / 2, width);
  }
}

constexpr BFloat16Kernels kBFloat16Kernels = {pack_keys, pack_values, dot_packed, add_packed};
constexpr const BFloat16Kernels* kInBFloat16 = &kBFloat16Kernels;
#else
constexpr const BFloat16Kernels* kInBFloat16 = nullptr;
#endif

}  // namespace kvg::KVG_ISA
