// Weights in groups, for linear_kernels.cpp: codes of 4 or 8 bits that stand for numbers, and a
// scale for each column and group of inputs, as checkpoints store them.
//
// A group's products are summed from zero, then scaled and added: one order for any number of rows.
// The factor of an NVFP4 column multiplies the whole sum. Without native dot products, many rows
// of some codes share one conversion of a panel's numbers to bfloat16, which represents them all
// exactly.
#pragma once

#include <algorithm>
#include <type_traits>

#include "cpu/linear_codes.h"
#include "cpu/linear_dot.h"
#include "cpu/vector.h"

namespace kvg::KVG_ISA {

// Most rows of a tile of one panel and of a pair of panels: sums of a group fill the registers.
#if KVG_NATIVE_DOT
constexpr int kGroupRows = 12, kGroupPairRows = 6;
#elif defined(__AVX512F__)
constexpr int kGroupRows = 8, kGroupPairRows = 4;
#else
constexpr int kGroupRows = 4, kGroupPairRows = 1;
#endif

template <int64_t Value>
using Constant = std::integral_constant<int64_t, Value>;

// The factors of a group's sums. `at`: index of the first column, counted over all groups.
template <int64_t Codes>
Vector group_scale(const Linear& job, int64_t at) {
  if (Codes != kE2m1 && Codes != kNvfp4)
    return load(Float32{}, job.scales + at) * Numbers<Codes>::kUnit;
#if KVG_NATIVE_DOT
  if (Codes == kNvfp4) {  // lacks the factor kScaleUnit
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(job.byte_scales + at));
    const __m256i wide = _mm256_slli_epi16(_mm256_cvtepi8_epi16(bytes), 7);
    return as<Vector>(_mm512_cvtph_ps(_mm256_and_si256(wide, _mm256_set1_epi16(~0x4000))));
  }
#endif
  Words bytes;
#if KVG_CODE_BYTES
  const __m128i eight = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(job.byte_scales + at));
  bytes = as<Words>(_mm256_cvtepu8_epi32(eight));
#else
  for (int lane = 0; lane < kLanes; ++lane) bytes[lane] = job.byte_scales[at + lane];
#endif
  return Codes == kE2m1 ? as<Vector>(bytes << 23) : of_e4m3(bytes << 24);
}

inline Vector group_offset(const Linear& job, int64_t at) { return load(Int8{}, job.offsets + at); }

// Writes the sum of a prepared row's inputs for each group, times the unit of offsets.
inline void add_group_sums(const Linear& job, const char* x, char* to) {
  const float unit = (job.codes == kEighths ? 0.125f : 1.0f) * unit_of(job.codes);
  for (int64_t first = 0; first < job.depth; first += job.group, to += sizeof(float)) {
    float sum = 0;
    for (int64_t k = first; k < std::min(job.depth, first + job.group); ++k) sum += input(x, k);
    sum *= unit;
    std::memcpy(to, &sum, sizeof sum);
  }
}

// Scales a group's sums, Rows x Panels, and adds them to the total sums. A call would keep them in
// memory.
template <int64_t Codes, bool HasOffsets, int Rows, int Panels>
[[gnu::always_inline]] inline void add_group(const Linear& job, int64_t panel, int64_t g,
                                             const char* of_groups,
                                             Vector (&group)[Rows][Panels * kVectors],
                                             Vector (&sums)[Rows][Panels * kVectors]) {
  KVG_UNROLL
  for (int v = 0; v < Panels * kVectors; ++v) {
    const int64_t at = ((panel + v / kVectors) * job.group_count() + g) * kColumns +
                       v % kVectors * kLanes;
    if constexpr (Codes == kIntegers && waits_for_lines(Rows))  // a line for each group
      __builtin_prefetch(job.scales + at + 16 * kColumns, 0, kSecondLevel);
    const Vector scale = group_scale<Codes>(job, at);
    KVG_UNROLL
    for (int m = 0; m < Rows; ++m) {
      if constexpr (HasOffsets) {
        const float total = read<float>(of_groups + m * job.x_stride + g * 4);
        group[m][v] += group_offset(job, at) * total;
      }
      sums[m][v] += group[m][v] * scale;
    }
  }
}

// Writes the total sums to `out`, whose rows are `width` apart.
template <int64_t Codes, int Rows, int Panels>
void put_groups(const Linear& job, int64_t panel, Vector (&sums)[Rows][Panels * kVectors],
                Vector* out, int width) {
  KVG_UNROLL
  for (int v = 0; v < Panels * kVectors; ++v) {
    Vector factor = Vector{} + 1.0f;
    const int64_t at = (panel + v / kVectors) * kColumns + v % kVectors * kLanes;
    if constexpr (Codes == kNvfp4) factor = load(Float32{}, job.scales + at) * kScaleUnit;
    KVG_UNROLL
    for (int m = 0; m < Rows; ++m) out[m * width + v] = sums[m][v] * factor;
  }
}

// Computes Rows x Panels sums. `first`: the first row; `of_groups`: the sums of its groups.
template <int64_t Codes, bool HasOffsets, int Rows, int Panels>
void tile_of_groups(const Linear& job, int64_t panel, const char* first, const char* of_groups,
                    Vector* out, int width) {
  constexpr int kEach = Panels * kVectors;
  constexpr int kLineInputs = line_inputs(Codes), kParts = kLineInputs / kPartInputs;
  constexpr int kTogether = KVG_CODE_BYTES ? 2 : kEach;  // their bytes stay in registers
  constexpr bool kWaits = code_bits(Codes) == 4 && waits_for_lines(Rows);
  const Numbers<Codes> numbers;
  const int64_t bytes = job.panel_bytes(), lines = job.line_count();
  const int64_t groups = job.group_count(), per_group = job.group / kLineInputs;
  const char* w = job.lines + panel * bytes;
  RowsAt<Rows> x(first, job.x_stride);
  Vector sums[Rows][kEach] = {};
  for (int64_t g = 0; g < groups; ++g) {
    Vector group[Rows][kEach] = {};
    const char* end = w + std::min(per_group, lines - g * per_group) * kLineBytes;
    for (; w < end; w += kLineBytes, x += kLineInputs * kInputBytes) {
      KVG_UNROLL
      for (int p = 0; p < Panels; ++p)
        prefetch<kWaits, 64>(w + p * bytes);
      KVG_UNROLL
      for (int first = 0; first < kEach; first += kTogether) {
        KVG_UNROLL
        for (int i = 0; i < kParts; ++i) {
          KVG_UNROLL
          for (int v = first; v < first + kTogether; ++v) {
            const char* line = w + v / kVectors * bytes + v % kVectors * (kLineBytes / kVectors);
            const auto part = numbers.part(line, code_of(kLineInputs / 2, i));
            KVG_UNROLL
            for (int m = 0; m < Rows; ++m) group[m][v] = add(group[m][v], x[m] + 4 * i, part);
          }
        }
      }
    }
    add_group<Codes, HasOffsets, Rows, Panels>(job, panel, g, of_groups, group, sums);
  }
  put_groups<Codes, Rows, Panels>(job, panel, sums, out, width);
}

// Computes the sums of a tile of `rows` rows: rows x panels x kVectors.
template <int64_t Codes, bool HasOffsets>
void sum_groups(const Linear& job, int64_t panel, int64_t panels, int64_t row, int64_t rows,
                Vector* out) {
  const char* x = job.x + row * job.x_stride;
  const char* of_groups = x + job.depth * kInputBytes;
  const int width = static_cast<int>(panels) * kVectors;
  if (panels == kPair && rows <= kGroupPairRows)
    return of_height<kGroupPairRows>(rows, [&](auto tall) {
      tile_of_groups<Codes, HasOffsets, tall.kCount, kPair>(job, panel, x, of_groups, out, width);
    });
  of_height<kGroupRows>(rows, [&](auto tall) {
    for (int64_t p = 0; p < panels; ++p)
      tile_of_groups<Codes, HasOffsets, tall.kCount, 1>(job, panel + p, x, of_groups,
                                                        out + p * kVectors, width);
  });
}

#if !KVG_NATIVE_DOT

// Most rows whose codes are multiplied as they are stored (measured). For more rows, codes are
// converted once to bfloat16.
constexpr int64_t code_rows(int64_t codes) {
  if (!KVG_CODE_BYTES) return 8;
  if (codes == kE4m3) return 4;
  return codes == kIntegers || codes == kEighths ? 64 : INT64_MAX;
}

// Converts the numbers of some lines to bfloat16, exactly, in lines as `Half` reads them.
template <int64_t Codes>
void to_halves(const char* w, int64_t lines, char* to) {
  constexpr int kEach = line_inputs(Codes) / 2;
  const Numbers<Codes> numbers;
  for (int64_t i = 0; i < lines; ++i, w += kLineBytes, to += kEach * kLineBytes) {
    __builtin_prefetch(w + kAhead * kLineBytes);
    KVG_UNROLL
    for (int v = 0; v < kVectors; ++v) {
      const int64_t at = v * (kLineBytes / kVectors);
      KVG_UNROLL
      for (int pair = 0; pair < kEach; ++pair) {
        const auto even = as<Words>(numbers.part(w + at, pair));
        const auto odd = as<Words>(numbers.part(w + at, kEach + pair));
        const Words both = even >> 16 | odd;
        std::memcpy(to + pair * kLineBytes + at, &both, sizeof both);
      }
    }
  }
}

// Bytes of a panel in bfloat16.
inline int64_t half_bytes(const Linear& job) { return job.depth / 2 * kLineBytes; }

// Does what tile_of_groups does, for one panel's numbers in bfloat16 at `w`.
template <int64_t Codes, bool HasOffsets, int Rows>
void tile_of_halves(const Linear& job, int64_t panel, const char* w, const char* x,
                    const char* of_groups, Vector* out, int width) {
  const int64_t bytes = half_bytes(job), lines = bytes / kLineBytes, per_group = job.group / 2;
  Vector sums[Rows][kVectors] = {};
  for (int64_t g = 0; g < job.group_count(); ++g) {
    const int64_t count = std::min(per_group, lines - g * per_group);
    Vector group[Rows][kVectors];
    tile<Half, Rows, 1>(x, job.x_stride, w, bytes, count, {w, 0, -1, nullptr}, group[0], kVectors);
    add_group<Codes, HasOffsets, Rows, 1>(job, panel, g, of_groups, group, sums);
    w += count * kLineBytes, x += count * Half::kStep;
  }
  put_groups<Codes, Rows, 1>(job, panel, sums, out, width);
}

// Does what sum_groups does, for numbers in bfloat16.
template <int64_t Codes, bool HasOffsets>
void sum_halves(const Linear& job, int64_t panel, int64_t panels, const char* w, int64_t row,
                int64_t rows, Vector* out) {
  const char* x = job.x + row * job.x_stride;
  const char* of_groups = x + job.depth * kInputBytes;
  const int width = static_cast<int>(panels) * kVectors;
  of_height<Half::kRows>(rows, [&](auto tall) {
    for (int64_t p = 0; p < panels; ++p)
      tile_of_halves<Codes, HasOffsets, tall.kCount>(job, panel + p, w + p * half_bytes(job), x,
                                                     of_groups, out + p * kVectors, width);
  });
}

#endif

// Calls body(codes, has_offsets) with a job's values as constants.
template <class Body>
void by_codes(const Linear& job, Body&& body) {
  using std::false_type;
  if (job.codes == kE4m3) return body(Constant<kE4m3>{}, false_type{});
  if (job.codes == kInt8) return body(Constant<kInt8>{}, false_type{});
  if (job.codes == kNvfp4) return body(Constant<kNvfp4>{}, false_type{});
  if (job.codes == kE2m1) return body(Constant<kE2m1>{}, false_type{});
  if (job.codes == kIq4) return body(Constant<kIq4>{}, false_type{});
  if (job.offsets) return body(Constant<kIntegers>{}, std::true_type{});
  body(Constant<kIntegers>{}, false_type{});
}

}  // namespace kvg::KVG_ISA
