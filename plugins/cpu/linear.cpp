#include "cpu/linear.h"

#include <vector>

#include "cpu/check.h"
#include "cpu/kernels.h"
#include "cpu/packed.h"

namespace kvg {
namespace {

using ll = long long;

constexpr Gate kSwiglu = {kSilu, 1.0f, kInfinity, 0.0f};

Linear read(const Operands& in) {
  const int64_t width = in.dims[KVG_DIM_IN_FEATURES];
  if (width == 0) refuse("linear: x: dim in_features: expected at least 1, got 0");
  const Form form{in.integer(KVG_LINEAR_ATTR_BITS), in.integer(KVG_LINEAR_ATTR_GROUP),
                  in.integer(KVG_LINEAR_ATTR_CODES)};
  Linear job =
      read_packed(in, KVG_LINEAR_WEIGHT, KVG_LINEAR_SCALES, form, width, "inputs of x");
  check_summed(in, job, width, "x: dim in_features");
  job.residual = in.data<const float>(KVG_LINEAR_RESIDUAL);
  if (in.integer(KVG_LINEAR_ATTR_SILU_MUL)) job.gate = &kSwiglu;
  job.rows = in.dims[KVG_DIM_ROWS];
  return job;
}

void check_sections(const Operands& in, Linear& job) {
  const int64_t blocks = job.gate ? job.panels / 2 : job.panels;
  int64_t block = 0;
  for (int i = 0; i < 3; ++i) {
    const int64_t width = in.integer(KVG_LINEAR_ATTR_OUT_FEATURES + i);
    const int output = KVG_LINEAR_OUT + i;
    if (width < 0)
      refuse("linear: %s: expected at least 0, got %lld",
             in.op.attributes[KVG_LINEAR_ATTR_OUT_FEATURES + i].name, ll{width});
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
  if (block != blocks || (job.gate && job.panels % 2))
    refuse("linear: weight: dim num_panels: expected %lld for out_features, got %lld",
           ll{job.gate ? 2 * block : block}, ll{job.panels});
  if (job.residual && job.num_sections != 1)
    refuse("linear: residual: expected none with %lld outputs", ll{job.num_sections});
}

// Prepared rows of one call; the calling thread keeps their memory for its next call.
struct Prepared {
  std::vector<char> rows;
  std::vector<float> scales;
};

void run_linear(const kvg_call& call, const LinearKernels& run, Linear& job, const float* x,
                int64_t width) {
  Taken<Prepared> kept;
  job.x_stride = stride_of(run, job);
  kept->rows.resize(static_cast<size_t>(job.rows * job.x_stride));
  kept->scales.resize(static_cast<size_t>(job.rows));
  char* rows = kept->rows.data();
  float* scales = kept->scales.data();
  job.x = rows, job.x_scales = scales;
  for_rows(call, job.rows, job.depth, [&](int64_t m) {
    run.prepare(job, x + m * width, width, rows + m * job.x_stride, scales + m);
  });
  multiply(call, run, &job, 1);
}

}  // namespace
}  // namespace kvg

extern "C" int32_t kvg_cpu_linear(const kvg_call* call, char* message, size_t message_size) {
  using namespace kvg;
  return entry(message, message_size, [&] {
    const Operands in = check(KVG_OP_LINEAR, call);
    Linear job = read(in);
    check_sections(in, job);
    const LinearKernels& run = linear_kernels();
    if (job.rows > 0)
      run_linear(*call, run, job, in.data<const float>(KVG_LINEAR_X), in.dims[KVG_DIM_IN_FEATURES]);
  });
}
