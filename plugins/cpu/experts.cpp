// A mixture of experts: rows are sorted by expert, so that each expert's weights are read once for
// all its rows; then each row's results are weighted and summed, and the residual is added. An
// index of -1 (an expert of another rank) is skipped.
//
// Legend: S slots. A slot is a row at one of its experts; slots are sorted by expert, then by row.
#include <algorithm>
#include <cstring>
#include <vector>

#include "cpu/check.h"
#include "cpu/kernels.h"
#include "cpu/packed.h"

namespace kvg {
namespace {

using ll = long long;

// Rows are processed in blocks whose slots take about this many bytes, whatever the step's size.
constexpr int64_t kBlockBytes = 64 << 20;
constexpr int32_t kNone = -1;

struct Experts {
  Linear up, down;  // weights of the first expert, without rows
  Gate gate;
  const float* x;          // M x width
  const int32_t* indices;  // M x active
  const float* weights;    // M x active
  const float* residual;   // M x width; nullptr: none
  float* out;              // M x width
  int64_t rows, width, inner, active, count;
};

// Up to so many numbers of a token's experts, sizes made of them fit 64 bits.
constexpr int64_t kMostSlots = int64_t{1} << 48;

// Memory of one call, which the calling thread keeps for its next call.
struct Kept {
  std::vector<int64_t> first;  // [count + 1]: first slot of each expert, then the end
  std::vector<int64_t> place;  // M x active: slots; -1: none
  std::vector<char> rows;      // prepared rows of slots
  std::vector<float> scales, inner, outer;
  std::vector<Linear> jobs;
  Reads reads;
};

Experts read(const Operands& in) {
  Experts op = {};
  const Form up{in.integer(KVG_EXPERTS_ATTR_UP_BITS), in.integer(KVG_EXPERTS_ATTR_UP_GROUP),
                in.integer(KVG_EXPERTS_ATTR_UP_CODES), "up_"};
  const Form down{in.integer(KVG_EXPERTS_ATTR_DOWN_BITS), in.integer(KVG_EXPERTS_ATTR_DOWN_GROUP),
                  in.integer(KVG_EXPERTS_ATTR_DOWN_CODES), "down_"};
  op.rows = in.dims[KVG_DIM_ROWS];
  op.width = in.dims[KVG_DIM_IN_FEATURES];
  op.active = in.dims[KVG_DIM_NUM_ACTIVE];
  op.count = in.dims[KVG_DIM_NUM_EXPERTS];
  op.inner = in.integer(KVG_EXPERTS_ATTR_INNER_FEATURES);
  if (op.width < 1) refuse("experts: x: dim in_features: expected at least 1, got 0");
  if (op.inner < 1)
    refuse("experts: inner_features: expected at least 1, got %lld", ll{op.inner});
  if (op.inner > kMostInputs)
    refuse("experts: inner_features: expected at most %lld, got %lld", ll{kMostInputs},
           ll{op.inner});
  const int64_t most = kMostSlots / std::max(op.width, op.inner);
  if (op.active > most)
    refuse("experts: indices: dim num_active: expected at most %lld, got %lld", ll{most},
           ll{op.active});
  op.up = read_packed(in, KVG_EXPERTS_UP, KVG_EXPERTS_UP_SCALES, up, op.width, "inputs of x");
  op.down = read_packed(in, KVG_EXPERTS_DOWN, KVG_EXPERTS_DOWN_SCALES, down, op.inner,
                        "inner_features");
  check_summed(in, op.up, op.width, "x: dim in_features");
  check_summed(in, op.down, op.inner, "inner_features");
  op.x = in.data<const float>(KVG_EXPERTS_X);
  op.indices = in.data<const int32_t>(KVG_EXPERTS_INDICES);
  op.weights = in.data<const float>(KVG_EXPERTS_WEIGHTS);
  op.residual = in.data<const float>(KVG_EXPERTS_RESIDUAL);
  op.out = in.data<float>(KVG_EXPERTS_OUT);
  return op;
}

void check_panels(const Experts& op) {
  const int64_t up = 2 * ceildiv(op.inner, kColumns), down = ceildiv(op.width, kColumns);
  if (op.up.panels != up)
    refuse("experts: up: dim num_up_panels: expected %lld for inner_features %lld, got %lld", ll{up},
           ll{op.inner}, ll{op.up.panels});
  if (op.down.panels != down)
    refuse("experts: down: dim num_down_panels: expected %lld for %lld inputs of x, got %lld",
           ll{down}, ll{op.width}, ll{op.down.panels});
}

Gate read_gate(const Operands& in) {
  const int64_t activation = in.integer(KVG_EXPERTS_ATTR_ACTIVATION);
  if (activation < kSilu || activation > kGeluTanh)
    refuse("experts: activation: expected 0, 1 or 2, got %lld", ll{activation});
  const float alpha = in.finite(KVG_EXPERTS_ATTR_ALPHA);
  const float limit = in.at_least_0(KVG_EXPERTS_ATTR_LIMIT);
  const float offset = in.finite(KVG_EXPERTS_ATTR_UP_OFFSET);
  return {activation, alpha, limit > 0 ? limit : kInfinity, offset};
}

void check_indices(const Experts& op) {
  for (int64_t i = 0; i < op.rows * op.active; ++i)
    if (op.indices[i] < kNone || op.indices[i] >= op.count)
      refuse("experts: indices: expected one of the %lld experts of up, or -1, got %lld",
             ll{op.count}, ll{op.indices[i]});
}

// Finds the slots, and returns their number.
int64_t sort_by_expert(const Experts& op, Kept& kept) {
  const int64_t turns = op.rows * op.active;
  kept.first.assign(static_cast<size_t>(op.count + 1), 0);
  kept.place.resize(static_cast<size_t>(turns));
  int64_t* first = kept.first.data();
  for (int64_t i = 0; i < turns; ++i)
    if (op.indices[i] != kNone) ++first[op.indices[i] + 1];
  for (int64_t e = 0; e < op.count; ++e) first[e + 1] += first[e];
  std::vector<int64_t> next(first, first + op.count);
  for (int64_t i = 0; i < turns; ++i)
    kept.place[static_cast<size_t>(i)] =
        op.indices[i] == kNone ? kNone : next[static_cast<size_t>(op.indices[i])]++;
  return first[op.count];
}

// Starts to read what is missing of all experts that have rows.
void start_reads(const Experts& op, Kept& kept) {
  for (int64_t e = 0; e < op.count; ++e) {
    if (kept.first[static_cast<size_t>(e)] == kept.first[static_cast<size_t>(e + 1)]) continue;
    start_reads(of_expert(op.up, e), kept.reads);
    start_reads(of_expert(op.down, e), kept.reads);
  }
}

// Makes a job for each expert that has rows: a copy of `like` with the expert's weights and slots.
void make_jobs(const Linear& like, Kept& kept, int64_t stride, float* out, int64_t width) {
  kept.jobs.clear();
  for (size_t e = 0; e + 1 < kept.first.size(); ++e) {
    const int64_t begin = kept.first[e], end = kept.first[e + 1];
    if (begin == end) continue;
    Linear job = of_expert(like, static_cast<int64_t>(e));
    job.rows = end - begin;
    job.x = kept.rows.data() + begin * stride, job.x_stride = stride;
    job.x_scales = kept.scales.data() + begin;
    job.sections[0] = {out + begin * width, width, 0, ceildiv(width, kColumns)};
    job.num_sections = 1;
    kept.jobs.push_back(job);
  }
}

void add(const float* x, float* out, int64_t count) {
#pragma omp simd
  for (int64_t c = 0; c < count; ++c) out[c] += x[c];
}

void run_block(const kvg_call& call, const LinearKernels& run, const Experts& op, Kept& kept) {
  const int64_t slots = sort_by_expert(op, kept);
  if (kept.reads.expected(op.rows)) start_reads(op, kept);
  const int64_t wide = stride_of(run, op.up), narrow = stride_of(run, op.down);
  kept.rows.resize(static_cast<size_t>(slots * std::max(wide, narrow)));
  kept.scales.resize(static_cast<size_t>(slots));
  kept.inner.resize(static_cast<size_t>(slots * op.inner));
  kept.outer.resize(static_cast<size_t>(slots * op.width));
  char* rows = kept.rows.data();
  float *scales = kept.scales.data(), *inner = kept.inner.data(), *outer = kept.outer.data();

  for_rows(call, op.rows, op.width * op.active, [&](int64_t m) {
    const int64_t* place = kept.place.data() + m * op.active;
    const int64_t* end = place + op.active;
    const int64_t* own = std::find_if(place, end, [](int64_t slot) { return slot != kNone; });
    if (own == end) return;
    run.prepare(op.up, op.x + m * op.width, op.width, rows + *own * wide, scales + *own);
    for (const int64_t* next = own + 1; next < end; ++next) {
      if (*next == kNone) continue;
      std::memcpy(rows + *next * wide, rows + *own * wide, static_cast<size_t>(wide - kLineBytes));
      scales[*next] = scales[*own];
    }
  });
  make_jobs(op.up, kept, wide, inner, op.inner);
  multiply(call, run, kept.jobs.data(), kept.jobs.size());

  for_rows(call, slots, op.inner, [&](int64_t s) {
    run.prepare(op.down, inner + s * op.inner, op.inner, rows + s * narrow, scales + s);
  });
  make_jobs(op.down, kept, narrow, outer, op.width);
  multiply(call, run, kept.jobs.data(), kept.jobs.size());

  for_rows(call, op.rows, op.width * op.active, [&](int64_t m) {
    float* out = op.out + m * op.width;
    std::fill(out, out + op.width, 0.0f);
    for (int64_t a = 0; a < op.active; ++a) {
      const int64_t slot = kept.place[static_cast<size_t>(m * op.active + a)];
      if (slot == kNone) continue;
      const float weight = op.weights[m * op.active + a];
      const float* part = outer + slot * op.width;
#pragma omp simd
      for (int64_t c = 0; c < op.width; ++c) out[c] += weight * part[c];
    }
    if (op.residual) add(op.residual + m * op.width, out, op.width);
  });
}

void run_experts(const kvg_call& call, const LinearKernels& run, const Experts& op) {
  Taken<Kept> kept;
  const int64_t slot = std::max(stride_of(run, op.up), stride_of(run, op.down)) +
                       static_cast<int64_t>(sizeof(float)) * (op.inner + op.width);
  const int64_t most = std::max<int64_t>(1, kBlockBytes / slot / op.active);
  const int64_t blocks = ceildiv(op.rows, most), per_block = ceildiv(op.rows, blocks);
  for (int64_t row = 0; row < op.rows; row += per_block) {
    Experts block = op;
    block.rows = std::min(per_block, op.rows - row);
    block.x += row * op.width, block.out += row * op.width;
    block.indices += row * op.active, block.weights += row * op.active;
    if (op.residual) block.residual += row * op.width;
    run_block(call, run, block, *kept);
  }
}

}  // namespace
}  // namespace kvg

extern "C" int32_t kvg_cpu_experts(const kvg_call* call, char* message, size_t message_size) {
  using namespace kvg;
  return entry(message, message_size, [&] {
    const Operands in = check(KVG_OP_EXPERTS, call);
    Experts op = read(in);
    check_panels(op);
    op.gate = read_gate(in);
    op.up.gate = &op.gate;
    check_indices(op);
    if (op.active == 0) {
      std::fill(op.out, op.out + op.rows * op.width, 0.0f);
      if (op.residual) add(op.residual, op.out, op.rows * op.width);
    } else if (op.rows > 0) {
      run_experts(*call, linear_kernels(), op);
    }
  });
}
