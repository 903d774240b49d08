// Products of a line of packed weights and a prepared row, for linear_kernels.cpp.
//
// Rows are prepared so that the inputs of a line are kStep bytes to broadcast: one float32; with
// native dot products 2 bfloat16 or 4 uint8 (int8 + 128, corrected by the sums of the weights'
// columns), else two float32 or four int16.
#pragma once

#include <cstdint>
#include <cstring>

#include "cpu/linear.h"
#include "cpu/vector.h"

#if defined(__AVX2__)
#include <immintrin.h>
#endif
#if defined(__AVX512BF16__) && defined(__AVX512VNNI__)
#define KVG_NATIVE_DOT 1
#else
#define KVG_NATIVE_DOT 0
#endif

namespace kvg::KVG_ISA {

constexpr int kVectors = kColumns / kLanes;  // vectors of a panel's columns
constexpr int64_t kAhead = 40;             // lines between the one read and the one prefetched
// Where prefetches go: the second-level cache can wait for more lines than the first level, which x
// fills.
constexpr int kSecondLevel = 2;
constexpr int32_t kOffset = KVG_NATIVE_DOT ? 128 : 0;

// Whether a tile of 4-bit numbers waits for memory rather than for its products. The fastest distance
// is then longer than kAhead (measured: docs/results/cpu-kernels.md).
constexpr bool waits_for_lines(int rows) { return KVG_NATIVE_DOT && rows <= 4; }

// Prefetches a line: of a tile that waits for memory, Far lines behind `line` into the second level.
template <bool Waits, int64_t Far>
[[gnu::always_inline]] inline void prefetch(const char* line) {
  __builtin_prefetch(line + (Waits ? Far : kAhead) * kLineBytes, 0, Waits ? kSecondLevel : 3);
}

template <class T>
T read(const char* from) {
  T value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

// Most rows of a tile; the number of registers limits them.
#if KVG_NATIVE_DOT
constexpr int kTileRows = 12;
#elif defined(__AVX512F__)
constexpr int kTileRows = 8;
#else
constexpr int kTileRows = 4;
#endif

// Kinds of weights. kRows: most rows of a tile of one panel. kPairRows: most rows of a tile of a
// pair of panels; for more rows, its panels are computed one after the other.

struct Whole {  // float32: one k a line
  using Sum = Vector;
  static constexpr int kRows = kLanes < 16 ? 6 : kTileRows;
  static constexpr int kPairRows = kLanes < 16 ? 3 : kTileRows;
  using Line = Vector;
  static constexpr int64_t kStep = 4;
  static Line line(const char* from) { return read<Vector>(from); }
  static Sum add(Sum sum, const char* x, Line w) { return sum + w * read<float>(x); }
};

struct Half {  // bfloat16: two k a line
  using Sum = Vector;
  static constexpr int kRows = kTileRows, kPairRows = kLanes < 16 ? 2 : kTileRows;
  static constexpr int64_t kStep = KVG_NATIVE_DOT ? 4 : 8;
#if KVG_NATIVE_DOT
  using Line = __m512i;
  static Line line(const char* from) { return _mm512_loadu_si512(from); }
  static Sum add(Sum sum, const char* x, Line w) {
    const __m512i pair = _mm512_set1_epi32(read<int32_t>(x));
    return as<Sum>(_mm512_dpbf16_ps(as<__m512>(sum), as<__m512bh>(pair), as<__m512bh>(w)));
  }
#else
  struct Line {
    Vector even, odd;
  };
  static Line line(const char* from) {
    const Words w = read<Words>(from);
    return {as<Vector>(w << 16), as<Vector>(w & 0xffff0000u)};
  }
  static Sum add(Sum sum, const char* x, const Line& w) {
    sum += w.even * read<float>(x);
    return sum + w.odd * read<float>(x + 4);
  }
#endif
};

struct Byte {  // int8: four k a line
  using Sum = Index;
  static constexpr int kRows = kTileRows, kPairRows = kLanes < 16 ? 2 : kTileRows;
  static constexpr int64_t kStep = KVG_NATIVE_DOT ? 4 : 8;
#if KVG_NATIVE_DOT
  using Line = __m512i;
  static Line line(const char* from) { return _mm512_loadu_si512(from); }
  static Sum add(Sum sum, const char* x, Line w) {
    const __m512i four = _mm512_set1_epi32(read<int32_t>(x));
    return as<Sum>(_mm512_dpbusd_epi32(as<__m512i>(sum), four, w));
  }
#elif defined(__AVX512BW__)
  struct Line {
    __m512i even, odd;
  };
  static Line line(const char* from) {
    const __m512i w = _mm512_loadu_si512(from);
    return {_mm512_srai_epi16(_mm512_slli_epi16(w, 8), 8), _mm512_srai_epi16(w, 8)};
  }
  static Sum add(Sum sum, const char* x, const Line& w) {
    const __m512i a = _mm512_madd_epi16(w.even, _mm512_set1_epi32(read<int32_t>(x)));
    const __m512i b = _mm512_madd_epi16(w.odd, _mm512_set1_epi32(read<int32_t>(x + 4)));
    return sum + as<Sum>(a) + as<Sum>(b);
  }
#elif defined(__AVX2__)
  struct Line {
    __m256i even, odd;
  };
  static Line line(const char* from) {
    const __m256i w = read<__m256i>(from);
    return {_mm256_srai_epi16(_mm256_slli_epi16(w, 8), 8), _mm256_srai_epi16(w, 8)};
  }
  static Sum add(Sum sum, const char* x, const Line& w) {
    const __m256i a = _mm256_madd_epi16(w.even, _mm256_set1_epi32(read<int32_t>(x)));
    const __m256i b = _mm256_madd_epi16(w.odd, _mm256_set1_epi32(read<int32_t>(x + 4)));
    return sum + as<Sum>(a) + as<Sum>(b);
  }
#else
  struct Line {
    Index k[4];
  };
  static Line line(const char* from) {
    const Index w = read<Index>(from);
    return {{(w << 24) >> 24, (w << 8) >> 24, (w << 16) >> 24, w >> 24}};  // in the order of rows
  }
  static Sum add(Sum sum, const char* x, const Line& w) {
    for (int i = 0; i < 4; ++i) sum += w.k[i] * int32_t{read<int16_t>(x + 2 * i)};
    return sum;
  }
#endif
};

// Prefetches while a tile is computed: the address of a line, and bytes to the next one's.
struct Fetch {
  const char* at;
  int64_t step;
  int64_t turn;      // at this line, prefetches continue at `then`
  const char* then;
};

// Addresses of rows: a pointer for every four of them, and 0 to 3 strides.
//
// Decision: the compiler must not know that these are multiples of one number. It would keep an
// address for each row, in more registers than there are, and move some to and from vector
// registers in every iteration: 12 rows of bfloat16 then reach 91 % of the processor's products in
// place of 98 % (Zen 4, GCC 12).
template <int Count>
class RowsAt {
 public:
  RowsAt(const char* first, int64_t stride) : stride_(stride), three_(3 * stride) {
    hide(three_);
    KVG_UNROLL
    for (int m = 0; m < kFours; ++m) hide(four_[m] = first + 4 * m * stride);
  }

  const char* operator[](int m) const {
    return four_[m / 4] + (m % 4 == 3 ? three_ : m % 4 * stride_);
  }

  void operator+=(int64_t bytes) {
    KVG_UNROLL
    for (int m = 0; m < kFours; ++m) four_[m] += bytes;
  }

 private:
  static constexpr int kFours = (Count + 3) / 4;

  template <class Number>
  static void hide(Number& number) {
    __asm__("" : "+r"(number));
  }

  const char* four_[kFours];
  int64_t stride_, three_;
};

// Computes Rows x Panels sums over all lines, of rows from `first` on and panels from `w` on; rows
// of `out` are `width` apart.
template <class Kind, int Rows, int Panels>
void tile(const char* first, int64_t stride, const char* w, int64_t panel_bytes, int64_t lines,
          Fetch fetch, typename Kind::Sum* out, int width) {
  RowsAt<Rows> x(first, stride);
  typename Kind::Sum sums[Rows][Panels * kVectors] = {};
  int64_t i = 0;
  for (const int64_t end : {fetch.turn < 0 ? lines : fetch.turn, lines}) {
    for (; i < end; ++i, x += Kind::kStep, w += kLineBytes, fetch.at += fetch.step) {
      typename Kind::Line line[Panels * kVectors];
      KVG_UNROLL
      for (int p = 0; p < Panels; ++p) __builtin_prefetch(fetch.at + p * panel_bytes, 0, kSecondLevel);
      KVG_UNROLL
      for (int p = 0; p < Panels * kVectors; ++p)
        line[p] =
            Kind::line(w + p / kVectors * panel_bytes + p % kVectors * (kLineBytes / kVectors));
      KVG_UNROLL
      for (int m = 0; m < Rows; ++m) {
        KVG_UNROLL
        for (int p = 0; p < Panels * kVectors; ++p)
          sums[m][p] = Kind::add(sums[m][p], x[m], line[p]);
      }
    }
    fetch.at = fetch.then;
  }
  KVG_UNROLL
  for (int m = 0; m < Rows; ++m) {
    KVG_UNROLL
    for (int p = 0; p < Panels * kVectors; ++p) out[m * width + p] = sums[m][p];
  }
}

// Calls body(Rows<rows>{}), for 1 to Most rows.
template <int Most, class Body>
void of_height(int64_t rows, Body&& body) {
  if (rows == Most) return body(Rows<Most>{});
  if constexpr (Most > 1) of_height<Most - 1>(rows, body);
}

}  // namespace kvg::KVG_ISA
