// Linear layers over weights packed for the CPU: what linear.cpp and experts.cpp ask of one
// instruction set.
//
// Legend: M rows, N output columns, K inputs padded to a multiple of kDepth. Weights lie in panels of
// kColumns output columns; a panel's lines of 64 bytes follow each other along K, each with the same
// few consecutive k of all its columns: 1 float32, 2 bfloat16, 4 int8, or 8 int4 (the low nibbles
// are the first four). int4 is stored divided by a multiplier 1 to 16 for each column and group of
// kGroup inputs, so that nibble times multiplier is an exact int8 under one scale for a column.
//
// With groups, weights are what a checkpoint stores: codes of 4 or 8 bits, and a scale for each column
// and `group` inputs. Pairs of a column's inputs are next to each other in 16 bits: code i of the low
// (high) half of its word is input 2i (2i + 1). Rows are rounded to bfloat16. Groups of NVFP4 have a
// scale in E4M3, and the column a factor of all its inputs.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kvgraph/contract.h"

namespace kvg {

constexpr int64_t kColumns = 16, kDepth = 64, kGroup = 32, kLineBytes = 64;
// What an attribute may say of inputs: sizes made of them fit 64 bits.
constexpr int64_t kMostInputs = int64_t{1} << 40;
constexpr int64_t kPair = 2;  // panels that are worked on together, gate and up of SwiGLU among them

// What joins the halves of a gated layer: activation(min(gate, limit)) * (clamp(up, limit) + offset).
struct Gate {
  int64_t activation;  // kSilu, kGelu or kGeluTanh
  float alpha;         // of silu: x * sigmoid(alpha * x)
  float limit;         // infinity: none
  float up_offset;
};
constexpr int64_t kSilu = KVG_ACTIVATION_SILU, kGelu = KVG_ACTIVATION_GELU,
                  kGeluTanh = KVG_ACTIVATION_GELU_TANH;
// Codes of groups, and their bits.
constexpr int64_t kIntegers = KVG_CODES_INTEGERS, kE2m1 = KVG_CODES_E2M1, kE4m3 = KVG_CODES_E4M3,
                  kInt8 = KVG_CODES_INT8, kNvfp4 = KVG_CODES_NVFP4;
constexpr int64_t code_bits(int64_t codes) { return codes == kE4m3 || codes == kInt8 ? 8 : 4; }
// What a group's inputs are a multiple of.
constexpr int64_t least_group(int64_t codes) { return codes == kNvfp4 ? 16 : kGroup; }

struct Section {
  float* out;          // M x width
  int64_t width;       // columns
  int64_t first, end;  // column blocks: panels, or pairs of panels under a gate
};

struct Linear {
  int64_t bits;                // 32, 16, 8 or 4
  int64_t group, codes;        // inputs under one scale, and what they are; 0: none
  int64_t panels, depth;       // depth: K
  const char* lines;           // panels x line_count() lines
  const uint8_t* multipliers;  // panels x K/kGroup x kColumns nibbles, less one each
  const uint8_t* byte_scales;  // of E2M1 (exponents) and NVFP4 (E4M3): panels x group_count() x
                               // kColumns
  const int8_t* offsets;       // of integers in groups, added to each: as those; nullptr: none
  const float* scales;         // panels x {scale, sum over K of the stored int8} x kColumns; of
                               // groups: as byte_scales; of NVFP4: panels x kColumns
  const float* bias;           // panels x kColumns; nullptr: none
  const float* residual;       // M x the only section's width; nullptr: none
  const Gate* gate;            // panels alternate gate and up, which it joins; nullptr: they do not
  Section sections[3];
  int64_t num_sections;
  const char* x;  // prepared rows, x_stride bytes apart
  int64_t x_stride, rows;
  const float* x_scales;  // M

  int64_t line_count() const { return depth * bits / 32; }  // of a panel
  int64_t panel_bytes() const { return line_count() * kLineBytes; }
  int64_t scale_count() const { return !group ? 2 : codes == kNvfp4 ? 1 : group_count(); }
  int64_t group_count() const { return group ? (depth + group - 1) / group : depth / kGroup; }
};

struct LinearKernels {
  // Bytes of a prepared row.
  int64_t (*row_bytes)(const Linear& job);
  // One row of `width` inputs, rounded to bfloat16, or to int8 under a scale of its own.
  void (*prepare)(const Linear& job, const float* x, int64_t width, char* to, float* scale);
  // Bytes of scratch that `multiply` needs.
  int64_t (*scratch_bytes)(const Linear& job);
  // Rows [row, row + rows) of the columns of a pair of panels (the last one may lack its second).
  void (*multiply)(const Linear& job, int64_t pair, int64_t row, int64_t rows, char* scratch);
};

}  // namespace kvg
