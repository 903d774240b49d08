// The settings of a node: its op and the fields that TensorRT gives a creator, with their checks.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "abi/tensorrt.h"
#include "launch/step.h"

namespace kvg::tensorrt {

using launch::kMaxOperands;

// Fields besides the op's attributes. `inputs`: bit i is set if input i of the op is given, because
// a TensorRT node cannot leave out an input in the middle. `pool_out`: whether the pool is an
// output. `aliased`: whether that output is declared to share the input's memory.
enum OwnField { kInputs, kAliased, kPoolOut, kKernelsField, kImagesField, kNumOwnFields };
constexpr const char* kOwnFields[kNumOwnFields] = {"inputs", "aliased", "pool_out", "kernels", "images"};

// The settings that a plugin shares with its clones; they never change.
struct Settings : launch::Node {
  int32_t inputs = 0, aliased = 1, pool_out = 1;
  std::shared_ptr<const std::string> kernels_record, images;
  std::vector<int> operands;  // indices in the op's table: the given inputs, then the outputs
  int num_inputs = 0;         // inputs in `operands`

  int num_outputs() const { return static_cast<int>(operands.size()) - num_inputs; }
  const kvg_operand& operand(int position) const { return op->operands[operands[position]]; }
  // Index in `operands` of an operand of the op's table; -1 if it is left out.
  int position(int operand) const;
  bool has(const char* input) const;
};

// Reads the settings of a node. Refuses a field that is missing, of another type, or not the value
// that the op's kernels were compiled for.
std::shared_ptr<const Settings> read_settings(const kvg_op& op, const trt::Fields* fields);

// Names and types of every field of KVG_OPS[op_index]; valid for the life of the process.
const trt::Fields* field_names(int op_index);

// The fields from which a creator makes an equal plugin.
class Serialized {
 public:
  explicit Serialized(const Settings& settings);
  const trt::Fields* fields() const { return &fields_; }

 private:
  std::vector<trt::Field> list_;
  trt::Fields fields_;
};

}  // namespace kvg::tensorrt
