#include "cpu/packed.h"

#include <algorithm>
#include <new>
#include <vector>

#include "cpu/kernels.h"

namespace kvg {
namespace {

using ll = long long;

// An operand, its name, and its extents and their names, counted from the last axis.
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

void check_packed(const Given& weight, const Given& scales, const Given& multipliers,
                  const Linear& job, int64_t width, const char* of) {
  const int64_t bits = job.bits;
  const int32_t stored = bits == 32 ? KVG_FLOAT32 : bits == 16 ? KVG_BFLOAT16 : KVG_INT8;
  const int32_t found = weight.in.dtype(weight.index);
  if (found != stored)
    refuse("%s: %s: expected %s for %lld bits, got %s", weight.in.op.name, weight.name(),
           KVG_DTYPE_NAMES[stored], ll{bits}, KVG_DTYPE_NAMES[found]);
  require_extent(weight, 0, bits < 16 ? kLineBytes : kLineBytes * 8 / bits);
  if (weight.extent(1) != job.line_count())
    refuse("%s: %s: dim %s: expected %lld for %lld %s, got %lld", weight.in.op.name, weight.name(),
           weight.dim(1), ll{job.line_count()}, ll{width}, of, ll{weight.extent(1)});
  require_given(scales, bits < 16, bits);
  require_given(multipliers, bits == 4, bits);
  if (bits == 4) require_extent(multipliers, 1, job.depth / kGroup);
}

}  // namespace

Linear read_packed(const Operands& in, int weight, int scales, int64_t bits, int64_t width,
                   const char* of) {
  if (bits != 32 && bits != 16 && bits != 8 && bits != 4)
    refuse("%s: bits: expected 32, 16, 8 or 4, got %lld", in.op.name, ll{bits});
  const int multipliers = scales + 1, bias = scales + 2;
  Linear job = {};
  job.bits = bits;
  job.depth = ceildiv(width, kDepth) * kDepth;
  job.panels = Given{in, weight}.extent(2);
  job.lines = in.data<const char>(weight);
  job.scales = in.data<const float>(scales);
  job.multipliers = in.data<const uint8_t>(multipliers);
  job.bias = in.data<const float>(bias);
  check_packed({in, weight}, {in, scales}, {in, multipliers}, job, width, of);
  return job;
}

Linear of_expert(Linear job, int64_t expert) {
  job.lines += expert * job.panels * job.panel_bytes();
  if (job.scales) job.scales += expert * job.panels * 2 * kColumns;
  if (job.multipliers) job.multipliers += expert * job.panels * (job.depth / kGroup) * (kColumns / 2);
  if (job.bias) job.bias += expert * job.panels * kColumns;
  return job;
}

bool multiply_pairs(const LinearKernels& run, const Linear& job, int64_t first, int64_t end,
                    int64_t row, int64_t rows) noexcept {
  static thread_local std::vector<char> scratch;
  const auto bytes = static_cast<size_t>(run.scratch_bytes(job));
  try {
    if (scratch.size() < bytes) scratch.resize(bytes);
  } catch (const std::bad_alloc&) {
    return false;
  }
  for (int64_t pair = first; pair < end; ++pair) run.multiply(job, pair, row, rows, scratch.data());
  return true;
}

}  // namespace kvg
