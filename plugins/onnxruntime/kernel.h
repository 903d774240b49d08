// The part of registered ops and their kernels that all providers share: it reads ONNX Runtime's
// types, attributes and operands by the tables of contract.h, whatever an op computes.
#pragma once

#include "abi/onnxruntime.h"
#include "common/base.h"

namespace kvg::onnxruntime {

constexpr int kMaxOperands = KVG_MAX_OPERANDS, kMaxAttributes = KVG_MAX_ATTRIBUTES;
using Entry = int32_t (*)(const kvg_call*, char*, size_t);

constexpr int kNumDtypes = sizeof KVG_DTYPE_ONNX / sizeof *KVG_DTYPE_ONNX;

// ONNX Runtime numbers element types as ONNX does.
inline ort::ElementType element_type_of(int32_t dtype) {
  return static_cast<ort::ElementType>(KVG_DTYPE_ONNX[dtype]);
}

// One registration: an op for one dtype of each type variable. The callbacks come first, so that
// the CustomOp pointer that ONNX Runtime passes back also points to the Variant.
struct Variant : ort::CustomOp {
  const kvg_op* op;
  Entry entry;        // entry point of the CPU kernel; null for another provider
  int32_t dtypes[4];  // indexed by type variable

  int32_t dtype(size_t operand) const {
    const kvg_operand& spec = op->operands[operand];
    if (spec.type_variable) return dtypes[spec.type_variable];
    int32_t code = 1;
    while (!(spec.dtypes >> code & 1u)) ++code;
    return code;
  }
};

inline const Variant& variant(const ort::CustomOp* op) { return *static_cast<const Variant*>(op); }

// Returns the status of a failed call from the function at once.
#define KVG_TRY(expression) \
  if (ort::Status* status_ = (expression)) return status_

// Runs a callback's body, out of which no exception may come: a status says what it said.
template <class Body>
ort::Status* guarded(const ort::Api* api, Body&& body) {
  try {
    return body();
  } catch (const std::exception& error) {
    const Failure failure = failure_of(error);
    const auto code = failure.status == KVG_DEVICE ? ort::kFail : ort::kInvalidArgument;
    return ort::CreateStatus::call(api, code, failure.sentence);
  }
}

// The status of a failed read of an attribute; null if the node has no attribute of that name. Only the
// message tells that from an attribute of another type.
ort::Status* unless_missing(const ort::Api* api, ort::Status* status);

// The kernel of a node: its attributes, and functions that read the operands of a step.
struct Kernel {
  const ort::Api* api;
  const Variant& variant;
  const kvg_op* op;
  kvg_value attributes[kMaxAttributes] = {};
  kvg_tensor constants[kMaxOperands] = {};  // inputs that no step changes; dtype 0: it is none

  Kernel(const ort::Api* given, const Variant& registered)
      : api(given), variant(registered), op(registered.op) {}

  ort::Status* read_attributes(const ort::KernelInfo* info);
  // Reads the inputs that are initializers of the graph. A step of one token asks for hundreds of
  // them: each takes a microsecond when the step has evicted the runtime's code from the caches.
  ort::Status* read_constants(const ort::KernelInfo* info);
  // Reads the inputs, then requests memory for the outputs. dtype 0: left out or unused.
  ort::Status* read_operands(ort::KernelContext* context, kvg_tensor* operands) const;
  // `type`: where to write the element type, which may be one that no operand has.
  ort::Status* read(const ort::Value* value, kvg_tensor& tensor,
                    ort::ElementType* type = nullptr) const;

 private:
  ort::Status* write(ort::KernelContext* context, size_t index, kvg_tensor* operands) const;
  void shape_of(const kvg_operand& output, const kvg_tensor* operands, int64_t* shape) const;
  int64_t extent(int32_t symbol, const kvg_tensor* operands) const;
};

// Set the callbacks of a variant that name a provider and make, run and destroy its kernels.
void use_cpu(Variant& variant);
void use_cuda(Variant& variant);

// Shape inference: an output has the shape of the input that it aliases, or of the first input,
// except for its last dim. Unknown dims stay unknown. use_api sets the API table of infer_shapes.
void use_api(const ort::Api* api);
ort::Status* infer_shapes(const ort::CustomOp* custom_op, ort::ShapeContext* context);

}  // namespace kvg::onnxruntime
