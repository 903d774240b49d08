// ONNX Runtime custom ops of domain "kvgraph" on the CPU provider, generic over the tables of
// contract.h: nothing here knows what an op computes.
//
// ONNX Runtime infers an output's type from the custom op whose input types match a node's, so each
// op is registered once for each pair of activation and pool dtype, under one name. The pool is
// mutated in place: its output is declared an alias of its input, and the kernel refuses two buffers.
#include <cstring>
#include <deque>
#include <string>
#include <vector>

#include "abi/onnxruntime.h"
#include "kvgraph/abi.h"

namespace {

constexpr int kMaxOperands = 16, kMaxAttributes = 8;
using Entry = int32_t (*)(const kvg_call*, char*, size_t);

// In the order of KVG_OPS.
constexpr Entry kEntries[KVG_NUM_OPS] = {kvg_cpu_store_kv, kvg_cpu_paged_attention,
                                         kvg_cpu_update_and_attend};

constexpr ort::ElementType kElementTypes[] = {
    ort::kUndefined, ort::kFloat,        ort::kFloat16, ort::kBFloat16,
    ort::kInt8,      ort::kFloat8E4M3FN, ort::kInt32};
constexpr int kNumDtypes = sizeof kElementTypes / sizeof *kElementTypes;

int32_t dtype_of(ort::ElementType type) {
  for (int code = 1; code < kNumDtypes; ++code)
    if (kElementTypes[code] == type) return code;
  return kNumDtypes;  // no kernel knows it
}

// One registration: an op for one dtype of each type variable. The callbacks come first, so that
// the pointer that ONNX Runtime hands back is a Variant's.
struct Variant : ort::CustomOp {
  const kvg_op* op;
  Entry entry;
  int32_t dtypes[3];  // by type variable

  ort::ElementType element_type(size_t operand) const {
    const kvg_operand& spec = op->operands[operand];
    if (spec.type_variable) return kElementTypes[dtypes[spec.type_variable]];
    int code = 1;
    while (!(spec.dtypes >> code & 1u)) ++code;
    return kElementTypes[code];
  }
};

const Variant& variant(const ort::CustomOp* op) { return *static_cast<const Variant*>(op); }

// A failed call's status, to return at once.
#define KVG_TRY(expression) \
  if (ort::Status* status_ = (expression)) return status_

// ---- the kernel -------------------------------------------------------------------------------

struct Kernel {
  const ort::Api* api;
  const Variant* variant;
  kvg_value attributes[kMaxAttributes];

  ort::Status* refuse(const std::string& sentence) const {
    return ort::CreateStatus::call(api, ort::kInvalidArgument, sentence.c_str());
  }
  ort::Status* read_attributes(const ort::KernelInfo* info);
  ort::Status* compute(ort::KernelContext* context) const;
  ort::Status* read(const ort::Value* value, kvg_tensor& tensor) const;
  ort::Status* write(ort::KernelContext* context, size_t index, kvg_tensor* operands) const;
  void shape_of(const kvg_operand& output, const kvg_tensor* operands, int64_t* shape) const;
  int64_t extent(int32_t symbol, const kvg_tensor* operands) const;
};

ort::Status* Kernel::read_attributes(const ort::KernelInfo* info) {
  for (int i = 0; i < variant->op->num_attributes; ++i) {
    const kvg_attribute& spec = variant->op->attributes[i];
    float real = static_cast<float>(spec.value);
    int64_t integer = static_cast<int64_t>(spec.value);
    ort::Status* absent = spec.is_float ? ort::AttributeFloat::call(api, info, spec.name, &real)
                                        : ort::AttributeInt::call(api, info, spec.name, &integer);
    if (absent && spec.required) return absent;
    if (absent) ort::ReleaseStatus::call(api, absent);
    spec.is_float ? attributes[i].f = real : attributes[i].i = integer;
  }
  return nullptr;
}

ort::Status* Kernel::read(const ort::Value* value, kvg_tensor& tensor) const {
  ort::TensorInfo* info = nullptr;
  KVG_TRY(ort::TensorTypeAndShape::call(api, value, &info));
  size_t rank = 0;
  ort::ElementType type = ort::kUndefined;
  ort::Status* status = ort::DimensionsCount::call(api, info, &rank);
  if (!status) status = ort::TensorElementType::call(api, info, &type);
  if (!status && rank <= KVG_MAX_RANK)
    status = ort::Dimensions::call(api, info, tensor.shape, rank);
  ort::ReleaseTensorInfo::call(api, info);
  if (status) return status;
  tensor.rank = static_cast<int32_t>(rank);
  tensor.dtype = dtype_of(type);
  return ort::TensorData::call(api, const_cast<ort::Value*>(value), &tensor.data);
}

// The extent of a dim that an input has, or an attribute of its name gives (0: head_dim's).
int64_t Kernel::extent(int32_t symbol, const kvg_tensor* operands) const {
  const kvg_op& op = *variant->op;
  for (int i = 0; i < op.num_attributes; ++i)
    if (!std::strcmp(op.attributes[i].name, KVG_DIM_NAMES[symbol]))
      return attributes[i].i ? attributes[i].i : extent(KVG_DIM_HEAD_DIM, operands);
  for (int i = 0; i < op.num_inputs; ++i)
    for (int axis = 0; axis < op.operands[i].rank; ++axis)
      if (operands[i].dtype && op.operands[i].dims[axis].symbol == symbol)
        return operands[i].shape[axis] - op.operands[i].dims[axis].value;
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
  const kvg_op& op = *variant->op;
  const kvg_operand& spec = op.operands[op.num_inputs + index];
  kvg_tensor& tensor = operands[op.num_inputs + index];
  if (spec.alias >= 0 && !operands[spec.alias].dtype) return nullptr;
  int64_t shape[KVG_MAX_RANK];
  if (spec.alias >= 0)
    std::memcpy(shape, operands[spec.alias].shape, sizeof shape);
  else
    shape_of(spec, operands, shape);
  ort::Value* value = nullptr;
  KVG_TRY(ort::Output::call(api, context, index, shape, static_cast<size_t>(spec.rank), &value));
  return value ? read(value, tensor) : nullptr;  // null: nobody takes this output
}

// The host's threads, as a kernel sees them.
struct Threads {
  const ort::Api* api;
  const ort::KernelContext* context;
  ort::Status* failure;

  static void run(void* self, kvg_task fn, void* task, size_t count) {
    auto& threads = *static_cast<Threads*>(self);
    ort::Status* status =
        ort::ParallelFor::call(threads.api, threads.context, fn, count, count, task);
    if (!status) return;
    if (threads.failure) ort::ReleaseStatus::call(threads.api, threads.failure);
    threads.failure = status;
  }
};

ort::Status* Kernel::compute(ort::KernelContext* context) const {
  const kvg_op& op = *variant->op;
  kvg_tensor operands[kMaxOperands] = {};
  size_t inputs = 0, outputs = 0;
  KVG_TRY(ort::InputCount::call(api, context, &inputs));
  KVG_TRY(ort::OutputCount::call(api, context, &outputs));
  for (size_t i = 0; i < inputs; ++i) {
    const ort::Value* value = nullptr;
    KVG_TRY(ort::Input::call(api, context, i, &value));
    if (value) KVG_TRY(read(value, operands[i]));
  }
  for (size_t i = 0; i < outputs; ++i) KVG_TRY(write(context, i, operands));
  Threads threads{api, context, nullptr};
  kvg_call call = {};
  call.abi_version = KVG_ABI_VERSION;
  call.struct_size = sizeof call;
  call.operands = operands;
  call.attributes = attributes;
  call.num_operands = static_cast<uint32_t>(op.num_inputs + op.num_outputs);
  call.num_attributes = static_cast<uint32_t>(op.num_attributes);
  call.parallel_for = Threads::run;
  call.host = &threads;
  char sentence[512] = "";
  const int32_t refused = variant->entry(&call, sentence, sizeof sentence);
  if (!threads.failure) return refused ? refuse(sentence) : nullptr;
  return threads.failure;
}

// ---- shapes in the graph ----------------------------------------------------------------------

// Reads an integer attribute of the node; 0 where it has none.
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

// `like`'s type and dims, names included, with `last` as the last dim.
ort::Status* with_last_dim(const ort::Api* api, const ort::TensorInfo* like, int64_t last,
                           ort::TensorInfo* info) {
  size_t rank = 0;
  ort::ElementType type = ort::kUndefined;
  int64_t dims[KVG_MAX_RANK];
  const char* names[KVG_MAX_RANK];
  KVG_TRY(ort::DimensionsCount::call(api, like, &rank));
  if (rank == 0 || rank > KVG_MAX_RANK) return nullptr;
  KVG_TRY(ort::TensorElementType::call(api, like, &type));
  KVG_TRY(ort::Dimensions::call(api, like, dims, rank));
  KVG_TRY(ort::SymbolicDimensions::call(api, like, names, rank));
  dims[rank - 1] = last;
  names[rank - 1] = "";
  KVG_TRY(ort::SetElementType::call(api, info, type));
  KVG_TRY(ort::SetDimensions::call(api, info, dims, rank));
  return ort::SetSymbolicDimensions::call(api, info, names, rank);
}

const ort::Api* g_api = nullptr;  // set once, by the first registration

// An output has the shape of the input that it aliases, or of the first input, whose last dim is
// attribute v_head_dim where the node gives one. Whatever is not known stays unknown.
ort::Status* infer_output(const kvg_op& op, ort::ShapeContext* context, size_t index) {
  const kvg_operand& spec = op.operands[op.num_inputs + static_cast<int>(index)];
  const size_t source = spec.alias >= 0 ? static_cast<size_t>(spec.alias) : 0;
  ort::TensorInfo *like = nullptr, *own = nullptr;
  size_t inputs = 0;
  KVG_TRY(ort::ShapeInputCount::call(g_api, context, &inputs));
  if (source >= inputs) return nullptr;
  KVG_TRY(ort::InputTypeShape::call(g_api, context, source, &like));
  const int64_t width = spec.alias < 0 ? node_attribute(g_api, context, "v_head_dim") : 0;
  if (width == 0) return ort::SetOutputTypeShape::call(g_api, context, index, like);
  KVG_TRY(ort::CreateTensorInfo::call(g_api, &own));
  ort::Status* status = with_last_dim(g_api, like, width, own);
  if (!status) status = ort::SetOutputTypeShape::call(g_api, context, index, own);
  ort::ReleaseTensorInfo::call(g_api, own);
  return status;
}

ort::Status* infer_shapes(const ort::CustomOp* custom_op, ort::ShapeContext* context) {
  const kvg_op& op = *variant(custom_op).op;
  for (size_t i = 0; i < static_cast<size_t>(op.num_outputs); ++i)
    if (ort::Status* unknown = infer_output(op, context, i))
      ort::ReleaseStatus::call(g_api, unknown);
  return nullptr;
}

// ---- registration -----------------------------------------------------------------------------

// The callback has no argument that tells the op, so each op has its own.
template <int Op>
size_t alias_map(int** inputs, int** outputs) {
  const kvg_op& op = *KVG_OPS[Op];
  *inputs = new int[op.num_outputs];
  *outputs = new int[op.num_outputs];
  size_t count = 0;
  for (int i = 0; i < op.num_outputs; ++i) {
    const int32_t alias = op.operands[op.num_inputs + i].alias;
    if (alias < 0) continue;
    (*inputs)[count] = alias;
    (*outputs)[count++] = i;
  }
  return count;
}

constexpr decltype(ort::CustomOp::GetAliasMap) kAliasMaps[KVG_NUM_OPS] = {
    alias_map<0>, alias_map<1>, alias_map<2>};

ort::Characteristic characteristic(const kvg_operand& spec) {
  return spec.optional ? ort::kOptional : ort::kRequired;
}

ort::Status* create_kernel(const ort::CustomOp* op, const ort::Api* api,
                           const ort::KernelInfo* info, void** kernel) {
  Kernel made{api, &variant(op), {}};
  KVG_TRY(made.read_attributes(info));
  *kernel = new Kernel(made);
  return nullptr;
}

Variant make_variant(int index, int32_t activation, int32_t pool) {
  Variant v = {};
  v.op = KVG_OPS[index];
  v.entry = kEntries[index];
  v.dtypes[1] = activation, v.dtypes[2] = pool;
  v.version = ort::kApiVersion;
  v.GetName = [](const ort::CustomOp* op) { return variant(op).op->name; };
  v.GetExecutionProviderType = [](const ort::CustomOp*) { return "CPUExecutionProvider"; };
  v.GetInputTypeCount = [](const ort::CustomOp* op) {
    return static_cast<size_t>(variant(op).op->num_inputs);
  };
  v.GetOutputTypeCount = [](const ort::CustomOp* op) {
    return static_cast<size_t>(variant(op).op->num_outputs);
  };
  v.GetInputType = [](const ort::CustomOp* op, size_t i) { return variant(op).element_type(i); };
  v.GetOutputType = [](const ort::CustomOp* op, size_t i) {
    return variant(op).element_type(static_cast<size_t>(variant(op).op->num_inputs) + i);
  };
  v.GetInputCharacteristic = [](const ort::CustomOp* op, size_t i) {
    return characteristic(variant(op).op->operands[i]);
  };
  v.GetOutputCharacteristic = [](const ort::CustomOp* op, size_t i) {
    const kvg_op& table = *variant(op).op;
    return characteristic(table.operands[static_cast<size_t>(table.num_inputs) + i]);
  };
  v.GetInputMemoryType = [](const ort::CustomOp*, size_t) { return int32_t{0}; };
  v.GetVariadicInputMinArity = [](const ort::CustomOp*) { return 1; };
  v.GetVariadicInputHomogeneity = [](const ort::CustomOp*) { return 1; };
  v.GetVariadicOutputMinArity = [](const ort::CustomOp*) { return 1; };
  v.GetVariadicOutputHomogeneity = [](const ort::CustomOp*) { return 1; };
  v.CreateKernelV2 = create_kernel;
  v.KernelComputeV2 = [](void* kernel, ort::KernelContext* context) {
    return static_cast<const Kernel*>(kernel)->compute(context);
  };
  v.KernelDestroy = [](void* kernel) { delete static_cast<Kernel*>(kernel); };
  v.InferOutputShape = infer_shapes;
  v.GetStartVersion = [](const ort::CustomOp*) { return KVG_OPSET_VERSION; };
  v.GetEndVersion = [](const ort::CustomOp*) { return KVG_OPSET_VERSION; };
  v.GetAliasMap = kAliasMaps[index];
  v.ReleaseAliasMap = [](int* inputs, int* outputs) {
    delete[] inputs;
    delete[] outputs;
  };
  return v;
}

// Every dtype that operands of a type variable may have, over the whole op.
uint32_t allowed(const kvg_op& op, int32_t type_variable) {
  for (int i = 0; i < op.num_inputs; ++i)
    if (op.operands[i].type_variable == type_variable) return op.operands[i].dtypes;
  return 1u << KVG_FLOAT32;
}

// The domain with every variant of every op; made once, and alive as long as the library.
struct Registration {
  ort::CustomOpDomain* domain = nullptr;
  ort::Status* failure = nullptr;
  std::deque<Variant> variants;

  explicit Registration(const ort::Api* api) {
    g_api = api;
    failure = ort::CreateCustomOpDomain::call(api, KVG_DOMAIN, &domain);
    for (int op = 0; op < KVG_NUM_OPS; ++op)
      for (int t = 1; t < kNumDtypes; ++t)
        for (int p = 1; p < kNumDtypes; ++p) {
          const bool both = (allowed(*KVG_OPS[op], 1) >> t & 1u) &&
                            (allowed(*KVG_OPS[op], 2) >> p & 1u);
          if (failure || !both) continue;
          variants.push_back(make_variant(op, t, p));
          failure = ort::AddToDomain::call(api, domain, &variants.back());
        }
  }
};

}  // namespace

extern "C" KVG_EXPORT ort::Status* RegisterCustomOps(ort::SessionOptions* options,
                                                     const ort::ApiBase* base) {
  const ort::Api* api = base->GetApi(ort::kApiVersion);
  if (!api) {
    const std::string sentence =
        "kvgraph: expected ONNX Runtime 1.21 or newer, got " + std::string(base->GetVersionString());
    return ort::CreateStatus::call(base->GetApi(1), ort::kFail, sentence.c_str());
  }
  static Registration registration(api);
  if (registration.failure)  // kept, so that a second session is refused too
    return ort::CreateStatus::call(api, ort::kFail,
                                   ort::ErrorMessage::call(api, registration.failure));
  return ort::AddDomain::call(api, options, registration.domain);
}
