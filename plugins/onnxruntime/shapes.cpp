#include "onnxruntime/kernel.h"

namespace kvg::onnxruntime {
namespace {

const ort::Api* g_api = nullptr;  // set once, by the first registration

// Reads an integer attribute of the node; 0 if the node does not have it.
int64_t node_attribute(const ort::Api* api, const ort::ShapeContext* context, const char* name) {
  const ort::OpAttribute* attribute = nullptr;
  int64_t value = 0;
  size_t size = 0;
  ort::Status* absent = ort::ShapeAttribute::call(api, context, name, &attribute);
  if (!absent && attribute)
    absent = ort::ReadAttribute::call(api, attribute, ort::kAttributeInt, &value, sizeof value,
                                      &size);
  if (absent) ort::ReleaseStatus::call(api, absent);
  return absent ? 0 : value;
}

// Gives `info` the dims of `like`, names included, but `last` as the last dim, and the type `own`,
// or that of `like` if `own` is kUndefined.
ort::Status* with_last_dim(const ort::Api* api, const ort::TensorInfo* like, int64_t last,
                           ort::ElementType own, ort::TensorInfo* info) {
  size_t rank = 0;
  ort::ElementType type = own;
  int64_t dims[KVG_MAX_RANK];
  const char* names[KVG_MAX_RANK];
  KVG_TRY(ort::DimensionsCount::call(api, like, &rank));
  if (rank == 0 || rank > KVG_MAX_RANK) return nullptr;
  KVG_TRY(ort::Dimensions::call(api, like, dims, rank));
  KVG_TRY(ort::SymbolicDimensions::call(api, like, names, rank));
  dims[rank - 1] = last;
  names[rank - 1] = "";
  if (own == ort::kUndefined) KVG_TRY(ort::TensorElementType::call(api, like, &type));
  KVG_TRY(ort::SetElementType::call(api, info, type));
  KVG_TRY(ort::SetDimensions::call(api, info, dims, rank));
  return ort::SetSymbolicDimensions::call(api, info, names, rank);
}

// Gives an output the shape of the input that it aliases, or of the first input, with the last dim
// from the node's attribute of that dim's name, if it has one. Unknown dims stay unknown.
ort::Status* infer_output(const Variant& made, ort::ShapeContext* context, size_t index) {
  const kvg_op& op = *made.op;
  const size_t operand = static_cast<size_t>(op.num_inputs) + index;
  const kvg_operand& spec = op.operands[operand];
  const size_t source = spec.alias >= 0 ? static_cast<size_t>(spec.alias) : 0;
  ort::TensorInfo *like = nullptr, *own = nullptr;
  size_t inputs = 0;
  KVG_TRY(ort::ShapeInputCount::call(g_api, context, &inputs));
  if (source >= inputs) return nullptr;
  KVG_TRY(ort::InputTypeShape::call(g_api, context, source, &like));
  const int32_t last = spec.dims[spec.rank - 1].symbol;
  const int64_t width =
      spec.alias < 0 && last >= 0 ? node_attribute(g_api, context, KVG_DIM_NAMES[last]) : 0;
  if (width == 0) return ort::SetOutputTypeShape::call(g_api, context, index, like);
  // A type variable has the node's type, which may differ from that of `made`, one of several
  // registrations.
  const ort::ElementType type =
      spec.type_variable ? ort::kUndefined : element_type_of(made.dtype(operand));
  KVG_TRY(ort::CreateTensorInfo::call(g_api, &own));
  ort::Status* status = with_last_dim(g_api, like, width, type, own);
  if (!status) status = ort::SetOutputTypeShape::call(g_api, context, index, own);
  ort::ReleaseTensorInfo::call(g_api, own);
  return status;
}

}  // namespace

void use_api(const ort::Api* api) { g_api = api; }

ort::Status* infer_shapes(const ort::CustomOp* custom_op, ort::ShapeContext* context) {
  const Variant& op = variant(custom_op);
  for (size_t i = 0; i < static_cast<size_t>(op.op->num_outputs); ++i)
    if (ort::Status* unknown = infer_output(op, context, i))
      ort::ReleaseStatus::call(g_api, unknown);
  return nullptr;
}

}  // namespace kvg::onnxruntime
