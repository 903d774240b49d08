#include "onnxruntime/kernel.h"

#include <algorithm>
#include <cstring>

namespace kvg::onnxruntime {
namespace {

int32_t dtype_of(ort::ElementType type) {
  for (int code = 1; code < kNumDtypes; ++code)
    if (element_type_of(code) == type) return code;
  return kNumDtypes;  // a code that kernels refuse
}

}  // namespace

ort::Status* unless_missing(const ort::Api* api, ort::Status* status) {
  if (!status || std::strstr(ort::ErrorMessage::call(api, status), " type")) return status;
  ort::ReleaseStatus::call(api, status);
  return nullptr;
}

ort::Status* Kernel::read_attributes(const ort::KernelInfo* info) {
  for (int i = 0; i < op->num_attributes; ++i) {
    const kvg_attribute& spec = op->attributes[i];
    float real = static_cast<float>(spec.value);
    int64_t integer = static_cast<int64_t>(spec.value);
    ort::Status* absent = spec.is_float ? ort::AttributeFloat::call(api, info, spec.name, &real)
                                        : ort::AttributeInt::call(api, info, spec.name, &integer);
    if (absent && spec.required) return absent;
    KVG_TRY(unless_missing(api, absent));
    spec.is_float ? attributes[i].f = real : attributes[i].i = integer;
  }
  return nullptr;
}

ort::Status* Kernel::read_constants(const ort::KernelInfo* info) {
  for (int i = 0; i < op->num_inputs; ++i) {
    int is_constant = 0;
    const ort::Value* value = nullptr;
    KVG_TRY(ort::ConstantInput::call(api, info, static_cast<size_t>(i), &is_constant, &value));
    if (is_constant) KVG_TRY(read(value, constants[i]));
  }
  return nullptr;
}

ort::Status* Kernel::read_operands(ort::KernelContext* context, kvg_tensor* operands) const {
  size_t inputs = 0, outputs = 0;
  KVG_TRY(ort::InputCount::call(api, context, &inputs));
  KVG_TRY(ort::OutputCount::call(api, context, &outputs));
  for (size_t i = 0; i < inputs; ++i) {
    operands[i] = constants[i];
    if (operands[i].dtype) continue;
    const ort::Value* value = nullptr;
    KVG_TRY(ort::Input::call(api, context, i, &value));
    if (value) KVG_TRY(read(value, operands[i]));
  }
  for (size_t i = 0; i < outputs; ++i) KVG_TRY(write(context, i, operands));
  return nullptr;
}

ort::Status* Kernel::read(const ort::Value* value, kvg_tensor& tensor,
                          ort::ElementType* found) const {
  const int64_t* shape = nullptr;
  size_t rank = 0;
  ort::ElementType type = ort::kUndefined;
  KVG_TRY(ort::TensorTypeAndShape::call(api, value, &type, &shape, &rank));
  if (rank <= KVG_MAX_RANK) std::copy_n(shape, rank, tensor.shape);
  tensor.rank = static_cast<int32_t>(rank);
  tensor.dtype = dtype_of(type);
  if (found) *found = type;
  return ort::TensorData::call(api, const_cast<ort::Value*>(value), &tensor.data);
}

// The extent of a dim: from the attribute of its name if there is one (0: head_dim's), else from an
// input.
int64_t Kernel::extent(int32_t symbol, const kvg_tensor* operands) const {
  for (int i = 0; i < op->num_attributes; ++i)
    if (!std::strcmp(op->attributes[i].name, KVG_DIM_NAMES[symbol]))
      return attributes[i].i ? attributes[i].i : extent(KVG_DIM_HEAD_DIM, operands);
  for (int i = 0; i < op->num_inputs; ++i)
    for (int axis = 0; axis < op->operands[i].rank; ++axis)
      if (operands[i].dtype && op->operands[i].dims[axis].symbol == symbol)
        return operands[i].shape[axis] - op->operands[i].dims[axis].value;
  return 0;
}

void Kernel::shape_of(const kvg_operand& output, const kvg_tensor* operands,
                      int64_t* shape) const {
  for (int axis = 0; axis < output.rank; ++axis) {
    const kvg_dim& dim = output.dims[axis];
    shape[axis] = dim.symbol < 0 ? dim.value : extent(dim.symbol, operands) + dim.value;
  }
}

ort::Status* Kernel::write(ort::KernelContext* context, size_t index,
                           kvg_tensor* operands) const {
  const kvg_operand& spec = op->operands[op->num_inputs + index];
  kvg_tensor& tensor = operands[op->num_inputs + index];
  if (spec.alias >= 0 && !operands[spec.alias].dtype) return nullptr;
  const auto rank = static_cast<size_t>(spec.rank);
  if (spec.alias >= 0)
    std::memcpy(tensor.shape, operands[spec.alias].shape, sizeof tensor.shape);
  else
    shape_of(spec, operands, tensor.shape);
  ort::Value* value = nullptr;
  KVG_TRY(ort::Output::call(api, context, index, tensor.shape, rank, &value));
  if (!value) return nullptr;  // the output is unused
  tensor.rank = spec.rank;
  tensor.dtype = variant.dtype(static_cast<size_t>(op->num_inputs) + index);
  return ort::TensorData::call(api, value, &tensor.data);
}

}  // namespace kvg::onnxruntime
