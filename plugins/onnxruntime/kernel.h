// What a registered op and its kernels have alike on every provider: ONNX Runtime's types, attributes
// and operands as the tables of contract.h have them. Nothing here knows what an op computes.
#pragma once

#include <string>

#include "abi/onnxruntime.h"
#include "kvgraph/abi.h"

namespace kvg::onnxruntime {

constexpr int kMaxOperands = KVG_MAX_OPERANDS, kMaxAttributes = KVG_MAX_ATTRIBUTES;
using Entry = int32_t (*)(const kvg_call*, char*, size_t);

constexpr int kNumDtypes = sizeof KVG_DTYPE_ONNX / sizeof *KVG_DTYPE_ONNX;

// ONNX Runtime numbers them as ONNX does.
inline ort::ElementType element_type_of(int32_t dtype) {
  return static_cast<ort::ElementType>(KVG_DTYPE_ONNX[dtype]);
}

// One registration: an op for one dtype of each type variable. The callbacks come first, so that
// the pointer that ONNX Runtime hands back is a Variant's.
struct Variant : ort::CustomOp {
  const kvg_op* op;
  Entry entry;        // of the CPU's kernel; null on another provider
  int32_t dtypes[3];  // by type variable

  ort::ElementType element_type(size_t operand) const {
    const kvg_operand& spec = op->operands[operand];
    if (spec.type_variable) return element_type_of(dtypes[spec.type_variable]);
    int code = 1;
    while (!(spec.dtypes >> code & 1u)) ++code;
    return element_type_of(code);
  }
};

inline const Variant& variant(const ort::CustomOp* op) { return *static_cast<const Variant*>(op); }

// A failed call's status, to return at once.
#define KVG_TRY(expression) \
  if (ort::Status* status_ = (expression)) return status_

// A node's kernel: its attributes, and how a step's operands are read.
struct Kernel {
  const ort::Api* api;
  const kvg_op* op;
  kvg_value attributes[kMaxAttributes];

  ort::Status* refuse(const std::string& sentence) const {
    return ort::CreateStatus::call(api, ort::kInvalidArgument, sentence.c_str());
  }
  ort::Status* read_attributes(const ort::KernelInfo* info);
  // Inputs, then outputs, for which memory is asked; dtype 0: left out, or not taken.
  ort::Status* read_operands(ort::KernelContext* context, kvg_tensor* operands) const;
  ort::Status* read(const ort::Value* value, kvg_tensor& tensor) const;

 private:
  ort::Status* write(ort::KernelContext* context, size_t index, kvg_tensor* operands) const;
  void shape_of(const kvg_operand& output, const kvg_tensor* operands, int64_t* shape) const;
  int64_t extent(int32_t symbol, const kvg_tensor* operands) const;
};

// The callbacks of a variant that make, run and destroy kernels of a provider, and its name.
void use_cpu(Variant& variant);
void use_cuda(Variant& variant);

// Output shapes in the graph: of the input that an output aliases, or of the first input. Whatever
// is not known stays unknown. `api` is the process's.
void use_api(const ort::Api* api);
ort::Status* infer_shapes(const ort::CustomOp* custom_op, ort::ShapeContext* context);

}  // namespace kvg::onnxruntime
