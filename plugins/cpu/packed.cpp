#include "cpu/packed.h"

#include <algorithm>
#include <vector>

#include "cpu/kernels.h"

namespace kvg {
namespace {

using ll = long long;

// An operand with its name, extents and names of dims; axes are counted from the last one.
struct Given {
  const Operands& in;
  int index;

  bool given() const { return in.has(index); }
  const char* name() const { return in.op.operands[index].name; }
  int64_t extent(int from_end) const { return in.dims[symbol(from_end)]; }
  const char* dim(int from_end) const { return KVG_DIM_NAMES[symbol(from_end)]; }

  int32_t symbol(int from_end) const {
    const kvg_operand& spec = in.op.operands[index];
    return spec.dims[spec.rank - 1 - from_end].symbol;
  }
};

void require_given(const Given& operand, bool expected, int64_t bits) {
  if (operand.given() != expected)
    refuse("%s: %s: expected %s for %lld bits, got %s", operand.in.op.name, operand.name(),
           expected ? "some" : "none", ll{bits}, expected ? "none" : "some");
}

void require_extent(const Given& operand, int from_end, int64_t expected) {
  if (operand.extent(from_end) != expected)
    refuse("%s: %s: dim %s: expected %lld, got %lld", operand.in.op.name, operand.name(),
           operand.dim(from_end), ll{expected}, ll{operand.extent(from_end)});
}

bool has_scales(const Form& form) { return form.bits < 16 && form.codes != kE2m1; }

bool has_code(const Form& form) {
  if (!form.group) return form.codes == kIntegers;
  return form.codes >= kIntegers && form.codes <= kIq4 && code_bits(form.codes) == form.bits;
}

void check_form(const kvg_op& op, const Form& form) {
  if (form.bits != 32 && form.bits != 16 && form.bits != 8 && form.bits != 4)
    refuse("%s: %sbits: expected 32, 16, 8 or 4, got %lld", op.name, form.stem, ll{form.bits});
  const int64_t least = least_group(form.codes);
  if (form.group < 0 || form.group % least)
    refuse("%s: %sgroup: expected a multiple of %lld, got %lld", op.name, form.stem, ll{least},
           ll{form.group});
  if (form.group > kMostInputs)
    refuse("%s: %sgroup: expected at most %lld, got %lld", op.name, form.stem,
           ll{kMostInputs}, ll{form.group});
  if (form.group && form.bits > 8)
    refuse("%s: %sgroup: expected 0 for %lld bits, got %lld", op.name, form.stem, ll{form.bits},
           ll{form.group});
  if (!has_code(form))
    refuse("%s: %scodes: expected %s for %lld bits%s, got %lld", op.name, form.stem,
           !form.group ? "0" : form.bits == 8 ? "2 or 3" : "0, 1, 4, 5 or 6", ll{form.bits},
           form.group ? "" : " without groups", ll{form.codes});
}

void check_packed(const Given& weight, const Given& scales, const Given& group_bytes,
                  const Linear& job, const Form& form, int64_t width, const char* of) {
  const int64_t bits = form.bits;
  const int32_t stored = bits == 32              ? KVG_FLOAT32
                         : bits == 16            ? KVG_BFLOAT16
                         : form.codes == kE4m3   ? KVG_FLOAT8_E4M3FN
                                                 : KVG_INT8;
  const int32_t found = weight.in.dtype(weight.index);
  if (found != stored)
    refuse("%s: %s: expected %s for %lld bits, got %s", weight.in.op.name, weight.name(),
           KVG_DTYPE_NAMES[stored], ll{bits}, KVG_DTYPE_NAMES[found]);
  require_extent(weight, 0, bits < 16 ? kLineBytes : kLineBytes * 8 / bits);
  if (weight.extent(1) != job.line_count())
    refuse("%s: %s: dim %s: expected %lld for %lld %s, got %lld", weight.in.op.name, weight.name(),
           weight.dim(1), ll{job.line_count()}, ll{width}, of, ll{weight.extent(1)});
  require_given(scales, has_scales(form), bits);
  if (scales.given()) require_extent(scales, 1, job.scale_count());
  const bool may_lack = form.group && form.bits == 4 && form.codes == kIntegers;
  const bool has_levels = form.group && form.codes == kIq4;
  if (!may_lack) require_given(group_bytes, bits == 4 && !has_levels, bits);
  if (!group_bytes.given()) return;
  require_extent(group_bytes, 1, job.group_count());
  require_extent(group_bytes, 0, form.group ? kColumns : kColumns / 2);
}

// Rows that are multiplied by all panels before the next rows: their inputs stay in the
// second-level cache.
constexpr int64_t kRowsPerBlock = 384;
// Up to this many rows, weights are read in long stretches, each in order; for more rows, a task is
// a pair of panels.
constexpr int64_t kFewRows = 16;
// Below this many bytes of weights, a product of few rows is done before another thread wakes up.
constexpr int64_t kBytesPerTask = 32768;

// Rows [begin, end) of a job, over pairs of panels [first, last).
struct Task {
  size_t job;
  int64_t first, last, begin, end;
};

// Decision: stretches get shorter, each half of a thread's share of what is left. Threads that take
// them in order then end almost together, 2 us apart. With 8 equal ones for 2 threads they end 8 to
// 11 us apart, and layers of one row (81 us each) take 2 to 7 % longer.
const std::vector<Task>& cut(const kvg_call& call, const Linear* jobs, size_t count,
                             std::vector<Task>& tasks) {
  tasks.clear();
  const int64_t pairs = ceildiv(jobs[0].panels, kPair);
  int64_t left = 0;  // pairs of panels of all jobs with few rows
  for (size_t j = 0; j < count; ++j) left += jobs[j].rows > kFewRows ? 0 : pairs;
  const int64_t least = std::max<int64_t>(1, kBytesPerTask / (kPair * jobs[0].panel_bytes()));
  const auto shares = static_cast<int64_t>(2 * parallelism(call));
  for (size_t j = 0; j < count; ++j) {
    const int64_t rows = jobs[j].rows;
    const int64_t per_block = ceildiv(rows, ceildiv(rows, kRowsPerBlock));
    for (int64_t row = 0; row < rows; row += per_block)
      for (int64_t pair = 0, end; pair < pairs; pair = end) {
        const int64_t stretch = rows > kFewRows ? 1 : std::max(least, ceildiv(left, shares));
        end = std::min(pairs, pair + stretch);
        if (rows <= kFewRows) left -= end - pair;
        tasks.push_back({j, pair, end, row, std::min(rows, row + per_block)});
      }
  }
  return tasks;
}

void run_task(const LinearKernels& run, const Linear& job, const Task& task) {
  static thread_local std::vector<char> scratch;
  const auto bytes = static_cast<size_t>(run.scratch_bytes(job));
  if (scratch.size() < bytes) scratch.resize(bytes);
  for (int64_t pair = task.first; pair < task.last; ++pair)
    run.multiply(job, pair, task.begin, task.end - task.begin, scratch.data());
}

}  // namespace

Linear read_packed(const Operands& in, int weight, int scales, const Form& form, int64_t width,
                   const char* of) {
  check_form(in.op, form);
  const int group_bytes = scales + 1, bias = scales + 2;
  Linear job = {};
  job.bits = form.bits, job.group = form.group, job.codes = form.codes;
  job.depth = ceildiv(width, kDepth) * kDepth;
  job.panels = Given{in, weight}.extent(2);
  job.lines = in.data<const char>(weight);
  job.scales = in.data<const float>(scales);
  if (!form.group)
    job.multipliers = in.data<const uint8_t>(group_bytes);
  else if (form.codes == kE2m1 || form.codes == kNvfp4)
    job.byte_scales = in.data<const uint8_t>(group_bytes);
  else if (form.codes == kIntegers || form.codes == kEighths)
    job.offsets = in.data<const int8_t>(group_bytes);
  job.bias = in.data<const float>(bias);
  check_packed({in, weight}, {in, scales}, {in, group_bytes}, job, form, width, of);
  return job;
}

void check_summed(const Operands& in, const Linear& job, int64_t width, const char* name) {
  if (job.bits < 16 && !job.group && width > kMostSummed)
    refuse("%s: %s: expected at most %lld for %lld bits without groups, got %lld", in.op.name, name,
           ll{kMostSummed}, ll{job.bits}, ll{width});
}

Linear of_expert(Linear job, int64_t expert) {
  const int64_t panels = expert * job.panels, groups = job.group_count();
  job.lines += panels * job.panel_bytes();
  if (job.scales) job.scales += panels * job.scale_count() * kColumns;
  if (job.multipliers) job.multipliers += panels * groups * (kColumns / 2);
  if (job.byte_scales) job.byte_scales += panels * groups * kColumns;
  if (job.offsets) job.offsets += panels * groups * kColumns;
  if (job.bias) job.bias += panels * kColumns;
  return job;
}

void start_reads(const Linear& job, Reads& reads) {
  const int64_t bytes = job.panels * job.group_count() * kColumns;  // of a byte for each group
  const auto floats = static_cast<int64_t>(sizeof(float));
  reads.start(job.lines, job.panels * job.panel_bytes());
  reads.start(job.scales, job.panels * job.scale_count() * kColumns * floats);
  reads.start(job.multipliers, bytes / 2);
  reads.start(job.byte_scales, bytes);
  reads.start(job.offsets, bytes);
  reads.start(job.bias, job.panels * kColumns * floats);
}

int64_t stride_of(const LinearKernels& run, const Linear& job) {
  return run.row_bytes(job) + kLine;
}

void multiply(const kvg_call& call, const LinearKernels& run, const Linear* jobs, size_t count) {
  if (count == 0) return;  // no row has an expert
  Taken<std::vector<Task>> kept;
  const std::vector<Task>& tasks = cut(call, jobs, count, *kept);
  in_order(call, tasks.size(), [&](size_t i) { run_task(run, jobs[tasks[i].job], tasks[i]); });
}

}  // namespace kvg
