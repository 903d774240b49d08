// Linear layers over weights packed for the CPU: the kernels of one instruction set, as linear.cpp
// and experts.cpp call them.
//
// Legend: M rows, N output columns, K inputs padded to a multiple of kDepth. Weights are stored in
// panels of kColumns output columns. A panel is a sequence of lines of 64 bytes along K, each with
// the same few consecutive k of all columns: 1 float32, 2 bfloat16, 4 int8, or 8 int4 (the low
// nibbles are the first four). int4 is stored divided by a multiplier 1 to 16 for each column and
// group of kGroup inputs: nibble times multiplier is an exact int8 under one scale for a column.
//
// With groups, weights are stored as in a checkpoint: codes of 4 or 8 bits, and a scale for each
// column and `group` inputs. In a column's 32-bit word, code i of the low (high) half is input 2i
// (2i + 1), so that pairs of inputs are in adjacent 16 bits. Rows are rounded to bfloat16. Groups
// of NVFP4 have a scale in E4M3, and each column has a factor of all its inputs.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kvgraph/contract.h"

namespace kvg {

constexpr int64_t kColumns = 16, kDepth = 64, kGroup = 32, kLineBytes = 64;
// Most inputs that an attribute may give: sizes computed from them fit 64 bits.
constexpr int64_t kMostInputs = int64_t{1} << 40;
// Most inputs of int8 or int4 without groups: sums of their products fit int32.
constexpr int64_t kMostSummed = int64_t{1} << 17;
constexpr int64_t kPair = 2;  // panels that are computed together, such as gate and up of SwiGLU

// How the halves of a gated layer are joined:
// activation(min(gate, limit)) * (clamp(up, -limit, limit) + up_offset).
struct Gate {
  int64_t activation;  // kSilu, kGelu or kGeluTanh
  float alpha;         // silu is x * sigmoid(alpha * x)
  float limit;         // infinity: none
  float up_offset;
};
constexpr int64_t kSilu = KVG_ACTIVATION_SILU, kGelu = KVG_ACTIVATION_GELU,
                  kGeluTanh = KVG_ACTIVATION_GELU_TANH;
// Codes of groups, and their bits.
constexpr int64_t kIntegers = KVG_CODES_INTEGERS, kE2m1 = KVG_CODES_E2M1, kE4m3 = KVG_CODES_E4M3,
                  kInt8 = KVG_CODES_INT8, kNvfp4 = KVG_CODES_NVFP4, kEighths = KVG_CODES_EIGHTHS,
                  kIq4 = KVG_CODES_IQ4_NL;
constexpr int64_t code_bits(int64_t codes) { return codes == kE4m3 || codes == kInt8 ? 8 : 4; }
// The size of a group is a multiple of this.
constexpr int64_t least_group(int64_t codes) { return codes == kNvfp4 ? 16 : kGroup; }

struct Section {
  float* out;          // M x width
  int64_t width;       // columns
  int64_t first, end;  // column blocks: panels, or pairs of panels under a gate
};

struct Linear {
  int64_t bits;                // 32, 16, 8 or 4
  int64_t group, codes;        // inputs under one scale (0: no groups), and the kind of their codes
  int64_t panels, depth;       // depth: K
  const char* lines;           // panels x line_count() lines
  const uint8_t* multipliers;  // panels x K/kGroup x kColumns nibbles, each a multiplier less one
  const uint8_t* byte_scales;  // scales of E2M1 (exponents) and NVFP4 (E4M3): panels x
                               // group_count() x kColumns
  const int8_t* offsets;       // added to integers of groups, in eighths for kEighths: shaped as
                               // byte_scales; nullptr: none
  const float* scales;         // panels x {scale, sum over K of the stored int8} x kColumns; with
                               // groups: shaped as byte_scales; NVFP4: panels x kColumns
  const float* bias;           // panels x kColumns; nullptr: none
  const float* residual;       // M x the only section's width; nullptr: none
  const Gate* gate;            // joins panels, which alternate gate and up; nullptr: no gate
  Section sections[3];
  int64_t num_sections;
  const char* x;  // prepared rows, x_stride bytes apart
  int64_t x_stride, rows;
  const float* x_scales;  // M

  int64_t line_count() const { return depth * bits / 32; }  // lines of a panel
  int64_t panel_bytes() const { return line_count() * kLineBytes; }
  int64_t scale_count() const { return !group ? 2 : codes == kNvfp4 ? 1 : group_count(); }
  int64_t group_count() const { return group ? (depth + group - 1) / group : depth / kGroup; }
};

struct LinearKernels {
  // Bytes of a prepared row.
  int64_t (*row_bytes)(const Linear& job);
  // Prepares a row of `width` inputs: as float32, or rounded to bfloat16, or to int8 with a scale.
  void (*prepare)(const Linear& job, const float* x, int64_t width, char* to, float* scale);
  // Bytes of scratch that `multiply` needs.
  int64_t (*scratch_bytes)(const Linear& job);
  // Computes rows [row, row + rows) of the columns of a pair of panels; the last pair may have only
  // one.
  void (*multiply)(const Linear& job, int64_t pair, int64_t row, int64_t rows, char* scratch);
};

}  // namespace kvg
