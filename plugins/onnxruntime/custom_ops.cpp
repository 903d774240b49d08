// ONNX Runtime custom ops of domain "kvgraph", generic over the tables of contract.h: registration.
//
// ONNX Runtime infers an output's type from the custom op whose input types match a node's, so each
// op is registered once for each choice of its type variables' dtypes and each provider, under one name:
// a provider that the runtime lacks leaves its registrations unused. The pool is mutated in place:
// its output is declared an alias of its input, and the kernel refuses two buffers.
#include <array>
#include <cstdio>
#include <deque>
#include <utility>

#include "onnxruntime/kernel.h"

namespace kvg::onnxruntime {
namespace {

// Entry points of the CPU kernels, in the order of KVG_CPU_OPS.
constexpr std::array kEntries{&kvg_cpu_store_kv,          &kvg_cpu_paged_attention,
                              &kvg_cpu_update_and_attend, &kvg_cpu_linear,
                              &kvg_cpu_all_reduce,        &kvg_cpu_all_gather,
                              &kvg_cpu_experts,           &kvg_cpu_route};
static_assert(kEntries.size() == KVG_NUM_CPU_OPS, "expected an entry point of each op");

// The inputs that outputs of an op alias, and these outputs.
struct Aliases {
  int inputs[KVG_MAX_OPERANDS], outputs[KVG_MAX_OPERANDS];
  size_t count = 0;

  explicit Aliases(const kvg_op& op) {
    for (int i = 0; i < op.num_outputs; ++i)
      if (const int32_t alias = op.operands[op.num_inputs + i].alias; alias >= 0)
        inputs[count] = alias, outputs[count++] = i;
  }
};

// The callback has no argument that tells the op, so each op has its own.
template <int Op>
size_t alias_map(int** inputs, int** outputs) {
  static Aliases made(*KVG_CPU_OPS[Op]);
  *inputs = made.count ? made.inputs : nullptr;
  *outputs = made.count ? made.outputs : nullptr;
  return made.count;
}

template <int... Op>
constexpr auto alias_maps(std::integer_sequence<int, Op...>) {
  return std::array<decltype(ort::CustomOp::GetAliasMap), sizeof...(Op)>{alias_map<Op>...};
}
constexpr auto kAliasMaps = alias_maps(std::make_integer_sequence<int, KVG_NUM_CPU_OPS>());

ort::Characteristic characteristic(const kvg_operand& spec) {
  return spec.optional ? ort::kOptional : ort::kRequired;
}

// Makes the registration of op `index` for the dtypes of the type variables T, P and Q. `use` sets the
// callbacks of a provider.
Variant make_variant(int index, int32_t t, int32_t p, int32_t q, void (*use)(Variant&)) {
  Variant v = {};
  v.op = KVG_CPU_OPS[index];
  v.entry = kEntries[index];
  v.dtypes[1] = t, v.dtypes[2] = p, v.dtypes[3] = q;
  v.version = ort::kCustomOpVersion;
  v.GetName = [](const ort::CustomOp* op) { return variant(op).op->name; };
  v.GetInputTypeCount = [](const ort::CustomOp* op) {
    return static_cast<size_t>(variant(op).op->num_inputs);
  };
  v.GetOutputTypeCount = [](const ort::CustomOp* op) {
    return static_cast<size_t>(variant(op).op->num_outputs);
  };
  v.GetInputType = [](const ort::CustomOp* op, size_t i) {
    return element_type_of(variant(op).dtype(i));
  };
  v.GetOutputType = [](const ort::CustomOp* op, size_t i) {
    return element_type_of(variant(op).dtype(static_cast<size_t>(variant(op).op->num_inputs) + i));
  };
  v.GetInputCharacteristic = [](const ort::CustomOp* op, size_t i) {
    return characteristic(variant(op).op->operands[i]);
  };
  v.GetOutputCharacteristic = [](const ort::CustomOp* op, size_t i) {
    const kvg_op& table = *variant(op).op;
    return characteristic(table.operands[static_cast<size_t>(table.num_inputs) + i]);
  };
  v.GetVariadicInputMinArity = [](const ort::CustomOp*) { return 1; };
  v.GetVariadicInputHomogeneity = [](const ort::CustomOp*) { return 1; };
  v.GetVariadicOutputMinArity = [](const ort::CustomOp*) { return 1; };
  v.GetVariadicOutputHomogeneity = [](const ort::CustomOp*) { return 1; };
  v.InferOutputShape = infer_shapes;
  v.GetStartVersion = [](const ort::CustomOp*) { return KVG_OPSET_VERSION; };
  v.GetEndVersion = [](const ort::CustomOp*) { return KVG_OPSET_VERSION; };
  v.GetAliasMap = kAliasMaps[index];
  v.ReleaseAliasMap = [](int*, int*) {};  // they are kept
  use(v);
  return v;
}

// Bit mask of the dtypes that a type variable of the op may have; float32 if the op has none.
uint32_t allowed(const kvg_op& op, int32_t type_variable) {
  for (int i = 0; i < op.num_inputs; ++i)
    if (op.operands[i].type_variable == type_variable) return op.operands[i].dtypes;
  return 1u << KVG_FLOAT32;
}

// The domain with every variant of every op; made once, it lives as long as the library.
struct Registration {
  ort::CustomOpDomain* domain = nullptr;
  ort::Status* failure = nullptr;
  std::deque<Variant> variants;

  explicit Registration(const ort::Api* api) {
    use_api(api);
    failure = ort::CreateCustomOpDomain::call(api, KVG_DOMAIN, &domain);
    for (int op = 0; op < KVG_NUM_CPU_OPS; ++op) add(api, op, use_cpu);
    for (int op = 0; op < KVG_NUM_OPS; ++op) add(api, op, use_cuda);
  }

  // Adds an op of one provider for every choice of dtypes.
  void add(const ort::Api* api, int op, void (*use)(Variant&)) {
    const auto may_be = [op](int32_t type_variable, int dtype) {
      return allowed(*KVG_CPU_OPS[op], type_variable) >> dtype & 1u;
    };
    for (int t = 1; t < kNumDtypes; ++t)
      for (int p = 1; p < kNumDtypes; ++p)
        for (int q = 1; q < kNumDtypes; ++q) {
          if (failure || !may_be(1, t) || !may_be(2, p) || !may_be(3, q)) continue;
          variants.push_back(make_variant(op, t, p, q, use));
          failure = ort::AddToDomain::call(api, domain, &variants.back());
        }
  }
};

// Whether artifacts do not run on a runtime of this version, such as "1.28.0".
bool is_too_old(const char* version) {
  int major = 0, minor = 0;
  std::sscanf(version, "%d.%d", &major, &minor);
  return major < 1 || (major == 1 && minor < ort::kOldestMinor);
}

}  // namespace
}  // namespace kvg::onnxruntime

using namespace kvg::onnxruntime;

extern "C" KVG_EXPORT ort::Status* RegisterCustomOps(ort::SessionOptions* options,
                                                     const ort::ApiBase* base) {
  return guarded(base->GetApi(1), [&]() -> ort::Status* {
    const char* version = base->GetVersionString();
    const ort::Api* api = base->GetApi(ort::kApiVersion);
    if (!api || is_too_old(version))
      kvg::refuse(KVG_DEVICE, "kvgraph: expected ONNX Runtime 1.%d or newer, got %s",
                  ort::kOldestMinor, version);
    static Registration registration(api);
    if (registration.failure)  // kept, so that a second session is refused too
      return ort::CreateStatus::call(api, ort::kFail,
                                     ort::ErrorMessage::call(api, registration.failure));
    return ort::AddDomain::call(api, options, registration.domain);
  });
}
