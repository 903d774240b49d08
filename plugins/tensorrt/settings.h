// What a node is: its op, the fields that TensorRT gives a creator, and their checks.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "abi/tensorrt.h"
#include "launch/step.h"

namespace kvg::tensorrt {

using launch::kMaxOperands;

// Fields besides the op's attributes. `inputs`: bit i is set where input i of the op is given, as
// TensorRT's nodes cannot leave one out in the middle. `pool_out`: whether the pool is an output.
// `aliased`: whether that output is declared to be the input's memory.
enum OwnField { kInputs, kAliased, kPoolOut, kKernelsField, kImagesField, kNumOwnFields };
constexpr const char* kOwnFields[kNumOwnFields] = {"inputs", "aliased", "pool_out", "kernels", "images"};

// Shared by a plugin and its clones; never changed.
struct Settings : launch::Node {
  int32_t inputs = 0, aliased = 1, pool_out = 1;
  std::shared_ptr<const std::string> kernels_record, images;
  std::vector<int> operands;  // of the op's table: the given inputs, then the outputs
  int num_inputs = 0;         // of `operands`

  int num_outputs() const { return static_cast<int>(operands.size()) - num_inputs; }
  const kvg_operand& operand(int position) const { return op->operands[operands[position]]; }
  // Where an operand of the op's table is among `operands`; -1: it is left out.
  int position(int operand) const;
  bool has(const char* input) const;
};

// Refuses a field that is missing, of another type, or not what the op's kernels were made for.
std::shared_ptr<const Settings> read_settings(const kvg_op& op, const trt::Fields* fields);

// Names and types of every field of `op`; stable for the life of the process.
const trt::Fields* field_names(int op_index);

// The fields that make an equal plugin.
class Serialized {
 public:
  explicit Serialized(const Settings& settings);
  const trt::Fields* fields() const { return &fields_; }

 private:
  std::vector<trt::Field> list_;
  trt::Fields fields_;
};

}  // namespace kvg::tensorrt
