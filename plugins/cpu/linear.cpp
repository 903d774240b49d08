#include "cpu/linear.h"

#include <algorithm>
#include <atomic>
#include <new>
#include <vector>

#include "cpu/check.h"
#include "cpu/kernels.h"
#include "cpu/parallel.h"

namespace kvg {
namespace {

using ll = long long;

// Rows that go along all panels before the next ones do: their inputs stay in the second-level cache.
constexpr int64_t kRowsPerBlock = 384;
// Inputs below which a row is prepared before another thread has woken up.
constexpr int64_t kInputsPerTask = 16384;
// Bytes of weights below which the same holds for a product of few rows.
constexpr int64_t kBytesPerTask = 32768;

int64_t ceildiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

Linear read(const Operands& in) {
  Linear job = {};
  job.bits = in.integer(KVG_LINEAR_ATTR_BITS);
  job.panels = in.dims[KVG_DIM_NUM_PANELS];
  job.lines = in.data<const char>(KVG_LINEAR_WEIGHT);
  job.multipliers = in.data<const uint8_t>(KVG_LINEAR_MULTIPLIERS);
  job.scales = in.data<const float>(KVG_LINEAR_SCALES);
  job.bias = in.data<const float>(KVG_LINEAR_BIAS);
  job.residual = in.data<const float>(KVG_LINEAR_RESIDUAL);
  job.silu_mul = in.integer(KVG_LINEAR_ATTR_SILU_MUL) != 0;
  job.rows = in.dims[KVG_DIM_ROWS];
  job.depth = ceildiv(in.dims[KVG_DIM_IN_FEATURES], kDepth) * kDepth;
  return job;
}

void check_weight(const Operands& in, const Linear& job) {
  if (job.depth == 0) refuse("linear: x: dim in_features: expected at least 1, got 0");
  if (job.bits != 16 && job.bits != 8 && job.bits != 4)
    refuse("linear: bits: expected 16, 8 or 4, got %lld", ll{job.bits});
  const bool half = in.dtype(KVG_LINEAR_WEIGHT) == KVG_BFLOAT16;
  if (half != (job.bits == 16))
    refuse("linear: weight: expected %s for %lld bits, got %s", job.bits == 16 ? "bfloat16" : "int8",
           ll{job.bits}, half ? "bfloat16" : "int8");
  const int64_t line = half ? kLineBytes / 2 : kLineBytes;
  if (in.dims[KVG_DIM_LINE] != line)
    refuse("linear: weight: dim line: expected %lld, got %lld", ll{line}, ll{in.dims[KVG_DIM_LINE]});
  if (in.dims[KVG_DIM_NUM_LINES] != job.line_count())
    refuse("linear: weight: dim num_lines: expected %lld for %lld inputs of x, got %lld",
           ll{job.line_count()}, ll{in.dims[KVG_DIM_IN_FEATURES]}, ll{in.dims[KVG_DIM_NUM_LINES]});
  if (in.has(KVG_LINEAR_SCALES) != (job.bits != 16))
    refuse("linear: scales: expected %s for %lld bits, got %s", job.bits != 16 ? "some" : "none",
           ll{job.bits}, in.has(KVG_LINEAR_SCALES) ? "some" : "none");
  if (in.has(KVG_LINEAR_MULTIPLIERS) != (job.bits == 4))
    refuse("linear: multipliers: expected %s for %lld bits, got %s", job.bits == 4 ? "some" : "none",
           ll{job.bits}, in.has(KVG_LINEAR_MULTIPLIERS) ? "some" : "none");
  if (job.bits == 4 && in.dims[KVG_DIM_NUM_GROUPS] != job.depth / kGroup)
    refuse("linear: multipliers: dim num_groups: expected %lld, got %lld", ll{job.depth / kGroup},
           ll{in.dims[KVG_DIM_NUM_GROUPS]});
}

void check_sections(const Operands& in, Linear& job) {
  const int64_t blocks = job.silu_mul ? job.panels / 2 : job.panels;
  int64_t block = 0;
  for (int i = 0; i < 3; ++i) {
    const int64_t width = in.integer(KVG_LINEAR_ATTR_OUT_FEATURES + i);
    const int output = KVG_LINEAR_OUT + i;
    if (width < 0) refuse("linear: out_features: expected at least 0, got %lld", ll{width});
    if (in.has(output) != (width > 0))
      refuse("linear: out: expected an output for each width above 0, got %s for width %lld",
             in.has(output) ? "one" : "none", ll{width});
    if (width == 0) continue;
    const int64_t found = in.call.operands[output].shape[1];
    if (found != width)
      refuse("linear: out: expected %lld columns from out_features, got %lld", ll{width}, ll{found});
    job.sections[job.num_sections++] = {in.data<float>(output), width, block,
                                        block + ceildiv(width, kColumns)};
    block += ceildiv(width, kColumns);
  }
  if (block != blocks || (job.silu_mul && job.panels % 2))
    refuse("linear: weight: dim num_panels: expected %lld for out_features, got %lld",
           ll{job.silu_mul ? 2 * block : block}, ll{job.panels});
  if (job.residual && job.num_sections != 1)
    refuse("linear: residual: expected none with %lld outputs", ll{job.num_sections});
}

// Prepared rows of one call, on the thread that made it: kept for the next call.
struct Prepared {
  std::vector<char> rows;
  std::vector<float> scales;
};

void multiply(const kvg_call& call, const LinearKernels& run, Linear& job, const float* x,
              int64_t width) {
  static thread_local Prepared kept;
  // A stride off the powers of two: rows of a tile lie in different sets of the cache.
  job.x_stride = run.row_bytes(job.bits, job.depth) + 64;
  kept.rows.resize(static_cast<size_t>(job.rows * job.x_stride));
  kept.scales.resize(static_cast<size_t>(job.rows));
  char* rows = kept.rows.data();
  float* scales = kept.scales.data();
  job.x = rows, job.x_scales = scales;
  const int64_t chunk = std::max<int64_t>(1, kInputsPerTask / job.depth);
  parallel_for(call, static_cast<size_t>(ceildiv(job.rows, chunk)), [&](size_t task) {
    const int64_t begin = static_cast<int64_t>(task) * chunk;
    for (int64_t m = begin; m < std::min(job.rows, begin + chunk); ++m)
      run.prepare(x + m * width, width, job.depth, job.bits, rows + m * job.x_stride, scales + m);
  });

  const int64_t pairs = ceildiv(job.panels, kPair);
  const int64_t blocks = ceildiv(job.rows, kRowsPerBlock);
  const int64_t per_block = ceildiv(job.rows, blocks);
  const int64_t least = std::max<int64_t>(1, kBytesPerTask / (kPair * job.panel_bytes()));
  // Few rows: few long stretches of weights, each read in order. Many: a pair each.
  const int64_t spread = static_cast<int64_t>(4 * parallelism(call));
  const int64_t step = job.rows > 16 ? 1 : std::max(least, ceildiv(pairs, spread));
  const int64_t steps = ceildiv(pairs, step);
  const auto scratch = static_cast<size_t>(run.scratch_bytes(job));
  std::atomic<bool> failed{false};  // a task must not throw
  parallel_for(call, static_cast<size_t>(blocks * steps), [&](size_t task) {
    static thread_local std::vector<char> own;
    try {
      if (own.size() < scratch) own.resize(scratch);
    } catch (const std::bad_alloc&) {
      failed = true;
      return;
    }
    const int64_t block = static_cast<int64_t>(task) / steps;
    const int64_t first = static_cast<int64_t>(task) % steps * step;
    const int64_t row = block * per_block, count = std::min(per_block, job.rows - row);
    for (int64_t pair = first; pair < std::min(pairs, first + step); ++pair)
      run.multiply(job, pair, row, count, own.data());
  });
  if (failed) throw std::bad_alloc();
}

}  // namespace
}  // namespace kvg

extern "C" int32_t kvg_cpu_linear(const kvg_call* call, char* message, size_t message_size) {
  using namespace kvg;
  return entry(message, message_size, [&] {
    const Operands in = check(KVG_OP_LINEAR, call);
    Linear job = read(in);
    check_weight(in, job);
    check_sections(in, job);
    const LinearKernels& run = linear_kernels();
    if (job.rows > 0)
      multiply(*call, run, job, in.data<const float>(KVG_LINEAR_X), in.dims[KVG_DIM_IN_FEATURES]);
  });
}
