// Compiled once per instruction set, as kernels.cpp is.
//
// The sums of a tile of a few rows x 1 or 2 panels stay in registers during one pass along K. With
// AMX, kAmxRows rows or more use its tiles instead. They add bfloat16 products in another order, so
// that a row's last bits then depend on the number of rows.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <type_traits>

#include "cpu/gate.h"
#include "cpu/kernels.h"
#include "cpu/linear.h"
#include "cpu/linear_dot.h"
#include "cpu/linear_groups.h"
#include "cpu/linear_nibbles.h"
#include "cpu/vector.h"
#if defined(KVG_AMX)
#include "cpu/amx_linear.h"
#endif

namespace kvg::KVG_ISA {
namespace {

#if defined(KVG_AMX)
constexpr int64_t kAmxRows = 16;  // rows of a whole tile; not tuned by measurement
static_assert(KVG_NATIVE_DOT, "tiles read rows as native dot products do");
#endif

// ---- from sums to outputs ---------------------------------------------------------------------

// The largest magnitude of a column's sum of stored int8. Scales that break this contract give
// wrong numbers, but no undefined conversion.
constexpr float kMostTotal = 128 * kMostSummed;

// Computes the values of one panel for one row from its sums.
void value(const Linear& job, int64_t panel, int64_t, const float* sums, float* to) {
  std::memcpy(to, sums, kColumns * sizeof(float));
  if (job.bias) {
    const float* bias = job.bias + panel * kColumns;
    for (int c = 0; c < kColumns; ++c) to[c] += bias[c];
  }
}

void value(const Linear& job, int64_t panel, int64_t row, const int32_t* sums, float* to) {
  const float* scale = job.scales + panel * 2 * kColumns;
  const float* total = scale + kColumns;
  const float own = job.x_scales[row];
  // Sums of x + kOffset may wrap around, the sums of x do not (kMostSummed).
#pragma omp simd
  for (int c = 0; c < kColumns; ++c) {
    float stored = total[c] < kMostTotal ? total[c] : kMostTotal;
    stored = stored > -kMostTotal ? stored : -kMostTotal;
    const uint32_t more = uint32_t{kOffset} * static_cast<uint32_t>(static_cast<int32_t>(stored));
    const auto sum = static_cast<int32_t>(static_cast<uint32_t>(sums[c]) - more);
    to[c] = static_cast<float>(sum) * (scale[c] * own);
  }
  if (job.bias) {
    const float* bias = job.bias + panel * kColumns;
    for (int c = 0; c < kColumns; ++c) to[c] += bias[c];
  }
}

const Section& section_of(const Linear& job, int64_t block) {
  int64_t i = 0;
  while (i + 1 < job.num_sections && block >= job.sections[i].end) ++i;
  return job.sections[i];
}

// The outputs of a block of columns: addresses in row 0, width of a row, and number of columns.
struct Place {
  float* out;
  const float* residual;
  int64_t width, count;
};

Place place_of(const Linear& job, int64_t block) {
  const Section& section = section_of(job, block);
  const int64_t column = (block - section.first) * kColumns, left = section.width - column;
  return {section.out + column, job.residual ? job.residual + column : nullptr, section.width,
          left < kColumns ? left : kColumns};
}

void copy(float* to, const float* from, int64_t count) {
  if (count == kColumns)
    std::memcpy(to, from, kColumns * sizeof(float));
  else
    std::memcpy(to, from, static_cast<size_t>(count) * sizeof(float));
}

// Computes outputs from sums and writes them. `sums`: rows x panels x kColumns.
//
// Decision: reads the residual of all rows, then computes, then writes all rows. Addresses in rows
// of 1,024 columns have the same last 12 bits, so a read waits for writes before it. Reads that
// wait for the third-level cache then follow each other instead of running together.
template <int Most, class Number>
void finish(const Linear& job, int64_t pair, int64_t panels, int64_t row, int64_t rows,
            const Number* sums) {
  alignas(64) float values[Most][kPair][kColumns], residual[Most][kPair][kColumns];
  Place places[kPair];
  const int64_t outs = job.gate ? 1 : panels;
  for (int64_t p = 0; p < outs; ++p) places[p] = place_of(job, job.gate ? pair : pair * kPair + p);
  if (job.residual)
    for (int64_t m = 0; m < rows; ++m)
      for (int64_t p = 0; p < outs; ++p)
        copy(residual[m][p], places[p].residual + (row + m) * places[p].width, places[p].count);
  for (int64_t m = 0; m < rows; ++m) {
    for (int64_t p = 0; p < panels; ++p, sums += kColumns)
      value(job, pair * kPair + p, row + m, sums, values[m][p]);
    if (job.gate) join(*job.gate, values[m][0], values[m][1]);
    if (!job.residual) continue;
    for (int64_t p = 0; p < outs; ++p)
      for (int64_t c = 0; c < places[p].count; ++c) values[m][p][c] += residual[m][p][c];
  }
  for (int64_t m = 0; m < rows; ++m)
    for (int64_t p = 0; p < outs; ++p)
      copy(places[p].out + (row + m) * places[p].width, values[m][p], places[p].count);
}

// ---- the entry points -------------------------------------------------------------------------

#if defined(KVG_AMX)
// Does what `run` does, for kAmxRows rows or more. The last tiles are as high as the rows left.
template <class Number>
void run_amx(const Linear& job, int64_t pair, int64_t panels, int64_t row, int64_t rows,
             const char* w, int64_t panel_bytes, int64_t lines) {
  constexpr int kBits = std::is_same_v<Number, float> ? 16 : 8;
  alignas(64) Number sums[kTallest * kPair * kColumns];
  for (int64_t left = rows, shaped = 0; left > 0;) {
    const int64_t take = left < kTallest ? left : kTallest;
    if (take != shaped) shape_tiles(take), shaped = take;
    const char* x = job.x + row * job.x_stride;
    sum_tiles_of<kBits>(take, panels, x, job.x_stride, w, panel_bytes, lines,
                        reinterpret_cast<char*>(sums));
    finish<kTallest>(job, pair, panels, row, take, sums);
    row += take, left -= take;
  }
  KVG_TILE_RELEASE();
}
#endif

template <int Most>
int64_t tile_count(int64_t rows) {
  return (rows + Most - 1) / Most;
}

// Cuts rows into tiles of at most Most rows, as even as possible. For each tile, calls
// sum(row, take, sums) and writes its outputs.
template <int Most, class Sum, class Number, class Body>
void by_tiles(const Linear& job, int64_t pair, int64_t panels, int64_t row, int64_t rows,
              Body&& sum) {
  alignas(64) Sum sums[Most * kPair * kVectors];
  const int64_t tiles = tile_count<Most>(rows);
  for (int64_t t = 0, left = rows; t < tiles; ++t) {
    const int64_t take = (left + tiles - t - 1) / (tiles - t);
    sum(row, take, sums);
    finish<Most>(job, pair, panels, row, take, reinterpret_cast<const Number*>(sums));
    row += take, left -= take;
  }
}

template <class Kind, class Number>
void run(const Linear& job, int64_t pair, int64_t panels, int64_t row, int64_t rows, const char* w,
         int64_t panel_bytes, int64_t lines, const char* next) {
#if defined(KVG_AMX)
  if constexpr (!std::is_same_v<Kind, Whole>)
    if (rows >= kAmxRows)
      return run_amx<Number>(job, pair, panels, row, rows, w, panel_bytes, lines);
#endif
  // The first tile prefetches its own lines; the others share those of the next pair of panels.
  const int64_t ahead = lines < kAhead ? lines : kAhead, tiles = tile_count<Kind::kRows>(rows);
  const int64_t step = tiles > 1 ? kLineBytes / (tiles - 1) : 0;
  Fetch fetch{w + ahead * kLineBytes, kLineBytes, lines - ahead, next};
  by_tiles<Kind::kRows, typename Kind::Sum, Number>(
      job, pair, panels, row, rows, [&](int64_t at, int64_t take, typename Kind::Sum* sums) {
        const char* x = job.x + at * job.x_stride;
        const int width = static_cast<int>(panels) * kVectors;
        if (panels == kPair && take <= Kind::kPairRows)
          of_height<Kind::kPairRows>(take, [&](auto tall) {
            tile<Kind, tall.kCount, kPair>(x, job.x_stride, w, panel_bytes, lines, fetch, sums,
                                           width);
          });
        else
          of_height<Kind::kRows>(take, [&](auto tall) {
            for (int64_t p = 0; p < panels; ++p, fetch.at += panel_bytes, fetch.then += panel_bytes)
              tile<Kind, tall.kCount, 1>(x, job.x_stride, w + p * panel_bytes, panel_bytes, lines,
                                         fetch, sums + p * kVectors, width);
          });
        fetch = {next, step, -1, nullptr};
        next += lines * step;
      });
}

void run_groups(const Linear& job, int64_t pair, int64_t panels, int64_t row, int64_t rows,
                [[maybe_unused]] char* scratch) {
  const int64_t panel = pair * kPair;
  by_codes(job, [&](auto codes, auto has_offsets) {
    constexpr int64_t kCodes = codes;
    constexpr bool kHasOffsets = has_offsets;
#if !KVG_NATIVE_DOT
    if (rows > code_rows(kCodes)) {
      to_halves<kCodes>(job.lines + panel * job.panel_bytes(), panels * job.line_count(), scratch);
      return by_tiles<Half::kRows, Vector, float>(
          job, pair, panels, row, rows, [&](int64_t at, int64_t take, Vector* sums) {
            sum_halves<kCodes, kHasOffsets>(job, panel, panels, scratch, at, take, sums);
          });
    }
#endif
    by_tiles<kGroupRows, Vector, float>(
        job, pair, panels, row, rows, [&](int64_t at, int64_t take, Vector* sums) {
          sum_groups<kCodes, kHasOffsets>(job, panel, panels, at, take, sums);
        });
  });
}

#if KVG_NIBBLE_ROWS
void run_nibbles(const Linear& job, int64_t pair, int64_t panels, int64_t row, int64_t rows,
                 const char* w, const uint8_t* factors) {
  const int64_t bytes = job.panel_bytes(), groups = job.group_count();
  by_tiles<kNibbleTileRows, Index, int32_t>(
      job, pair, panels, row, rows, [&](int64_t at, int64_t take, Index* sums) {
        const char* x = job.x + at * job.x_stride;
        of_height<kNibbleTileRows>(take, [&](auto tall) {
          for (int64_t p = 0; p < panels; ++p)
            tile_of_nibbles<tall.kCount>(x, job.x_stride, w + p * bytes,
                                         factors + p * groups * (kColumns / 2), groups,
                                         sums + p * kVectors, static_cast<int>(panels) * kVectors);
        });
      });
}
#endif

void multiply(const Linear& job, int64_t pair, int64_t row, int64_t rows,
              [[maybe_unused]] char* scratch) {
  const int64_t first = pair * kPair, left = job.panels - first;
  const int64_t panels = left < kPair ? left : kPair;
  if (job.group) return run_groups(job, pair, panels, row, rows, scratch);
  const int64_t bytes = job.panel_bytes(), lines = job.line_count();
  const char* w = job.lines + first * bytes;
  const char* next = w + panels * bytes;  // only prefetched: may be past the end
  if (job.bits == 32) return run<Whole, float>(job, pair, panels, row, rows, w, bytes, lines, next);
  if (job.bits == 16) return run<Half, float>(job, pair, panels, row, rows, w, bytes, lines, next);
  if (job.bits == 8) return run<Byte, int32_t>(job, pair, panels, row, rows, w, bytes, lines, next);
  const int64_t groups = job.group_count();
  const uint8_t* factors = job.multipliers + first * groups * (kColumns / 2);
#if KVG_NIBBLE_ROWS
  if (rows <= KVG_NIBBLE_ROWS) return run_nibbles(job, pair, panels, row, rows, w, factors);
#endif
#if !KVG_NIBBLE_BYTES
  for (int64_t p = 0; p < panels; ++p)
    expand(w + p * bytes, factors + p * groups * (kColumns / 2), groups, scratch + p * 2 * bytes);
  run<Byte, int32_t>(job, pair, panels, row, rows, scratch, 2 * bytes, 2 * lines, scratch);
#endif
}

// Bytes of a prepared row without the sums of its groups.
int64_t input_bytes(const Linear& job) {
  if (job.bits == 32) return job.depth * Whole::kStep;
  if (job.bits == 16 || job.group) return job.depth * Half::kStep / 2;
  if (KVG_NIBBLE_BYTES && job.bits == 4) return job.depth;
  return job.depth * Byte::kStep / 4;
}

int64_t row_bytes(const Linear& job) {
  const bool has_sums = job.offsets || (KVG_NIBBLE_BYTES && job.bits == 4 && !job.group);
  const int64_t sums = has_sums ? job.group_count() * static_cast<int64_t>(sizeof(float)) : 0;
  return (input_bytes(job) + sums + kLineBytes - 1) / kLineBytes * kLineBytes;
}

int64_t scratch_bytes(const Linear& job) {
#if !KVG_NATIVE_DOT
  if (job.group && job.rows > code_rows(job.codes)) return kPair * half_bytes(job);
#endif
  return job.bits == 4 && !job.group && !KVG_NIBBLE_BYTES ? 2 * kPair * job.panel_bytes() : 0;
}

// Rounds inputs to bfloat16. Without native dot products, writes them divided by `unit`.
void prepare_half(const float* x, int64_t width, int64_t depth, [[maybe_unused]] float unit,
                  char* to) {
#if KVG_NATIVE_DOT
  int64_t k = 0;
  for (; k + 16 <= width; k += 16) {
    const __m256bh half = _mm512_cvtneps_pbh(_mm512_loadu_ps(x + k));
    std::memcpy(to + 2 * k, &half, sizeof half);
  }
  for (; k < depth; ++k) {
    const uint16_t half = k < width ? BFloat16::encode(x[k]) : 0;
    std::memcpy(to + 2 * k, &half, sizeof half);
  }
#else
  for (int64_t k = 0; k < depth; ++k) {
    const float rounded = k < width ? BFloat16::decode(BFloat16::encode(x[k])) / unit : 0.0f;
    std::memcpy(to + 4 * k, &rounded, sizeof rounded);
  }
#endif
}

void prepare_byte(int64_t bits, const float* x, int64_t width, int64_t depth, char* to,
                  float* scale) {
  uint32_t most = 0;  // bits of the largest magnitude; infinities and NaN have more than numbers
#pragma omp simd reduction(max : most)
  for (int64_t k = 0; k < width; ++k) {
    const uint32_t magnitude = bits_of(x[k]) & 0x7fffffffu;
    most = magnitude > most ? magnitude : most;
  }
  const bool finite = most < kFloatInf;
  *scale = float_of(finite ? most : kFloatNaN) / 127.0f;
  const float inverse = 127.0f / float_of(most);
  // Numbers so small that the inverse is infinite count as zeros.
  const bool counts = finite && bits_of(inverse) < kFloatInf;
  const auto rounded = [&](int64_t k) {
    const float exact = counts ? x[k] * inverse : 0.0f;
    // In a thread that rounds upward the largest one is above 127.
    return static_cast<int32_t>(std::nearbyintf(exact < 127.0f ? exact : 127.0f));
  };
#if KVG_NATIVE_DOT
  (void)bits;
  auto* out = reinterpret_cast<uint8_t*>(to);
#pragma omp simd
  for (int64_t k = 0; k < width; ++k) out[k] = static_cast<uint8_t>(rounded(k) + kOffset);
  for (int64_t k = width; k < depth; ++k) out[k] = kOffset;
#else
#if KVG_NIBBLE_BYTES
  if (bits == 4) {
    auto* out = reinterpret_cast<int8_t*>(to);
#pragma omp simd
    for (int64_t k = 0; k < width; ++k) out[k] = static_cast<int8_t>(rounded(k));
    std::fill(out + width, out + depth, int8_t{0});
    return add_starts(out, depth, to + depth);
  }
#endif
  (void)bits;
  constexpr int64_t kPlace[4] = {0, 2, 1, 3};  // even k of a line's four, then odd ones
  auto* out = reinterpret_cast<int16_t*>(to);
  for (int64_t k = 0; k < depth; ++k)
    out[k / 4 * 4 + kPlace[k % 4]] = static_cast<int16_t>(k < width ? rounded(k) : 0);
#endif
}

void prepare(const Linear& job, const float* x, int64_t width, char* to, float* scale) {
  if (job.bits == 32) {
    std::memcpy(to, x, static_cast<size_t>(width) * sizeof(float));
    std::memset(to + width * 4, 0, static_cast<size_t>(job.depth - width) * sizeof(float));
  } else if (job.bits == 16 || job.group) {
    prepare_half(x, width, job.depth, job.group ? unit_of(job.codes) : 1.0f, to);
    if (job.offsets) add_group_sums(job, to, to + input_bytes(job));
  } else {
    prepare_byte(job.bits, x, width, job.depth, to, scale);
  }
}

}  // namespace

extern const LinearKernels kLinearKernels;
const LinearKernels kLinearKernels = {row_bytes, prepare, scratch_bytes, multiply};

}  // namespace kvg::KVG_ISA
