// An op that calls the functions of ONNX Runtime's table that only kvgraph's CUDA ops use, on a CPU,
// and writes what they answered: whether the allocator of its memory works, extent of attribute `bytes`
// and whether it is whole, whether there is a stream. Refuses if a missing attribute cannot be told
// from one of another type, `text`.
#include <cstring>

#include "abi/onnxruntime.h"
#include "kvgraph/abi.h"

namespace {

struct Probe {
  const ort::Api* api;
  float answers[3];
};

ort::Status* create(const ort::CustomOp*, const ort::Api* api, const ort::KernelInfo* info, void** out) {
  auto* probe = new Probe{api, {}};
  *out = probe;
  ort::Allocator* allocator = nullptr;
  if (auto* status = ort::KernelAllocator::call(api, info, ort::kDefaultMemory, &allocator)) return status;
  void* memory = allocator->Alloc(allocator, 64);
  probe->answers[0] = memory && allocator->Info(allocator);
  memset(memory, 1, 64);
  allocator->Free(allocator, memory);
  ort::ReleaseAllocator::call(api, allocator);
  ort::Value* value = nullptr;
  ort::ElementType type = ort::kUndefined;
  const int64_t* shape = nullptr;
  size_t rank = 0;
  void* data = nullptr;
  if (auto* status = ort::DefaultAllocator::call(api, &allocator)) return status;
  ort::Status* absent = ort::AttributeTensor::call(api, info, "nothing", allocator, &value);
  if (!absent) return ort::CreateStatus::call(api, ort::kFail, "an attribute that is not there");
  ort::Status* other = ort::AttributeTensor::call(api, info, "text", allocator, &value);
  if (!other || strstr(ort::ErrorMessage::call(api, absent), " type")) return absent;
  if (!strstr(ort::ErrorMessage::call(api, other), " type")) return other;
  ort::ReleaseStatus::call(api, absent);
  ort::ReleaseStatus::call(api, other);
  if (auto* status = ort::AttributeTensor::call(api, info, "bytes", allocator, &value)) return status;
  if (auto* status = ort::TensorTypeAndShape::call(api, value, &type, &shape, &rank)) return status;
  if (auto* status = ort::TensorData::call(api, value, &data)) return status;
  probe->answers[1] = rank == 1 && type == ort::kUint8 ? static_cast<float>(*shape) : 0;
  probe->answers[2] = !memcmp(data, "\xff\0\x80", 3);
  ort::ReleaseValue::call(api, value);
  return nullptr;
}

ort::Status* compute(void* kernel, ort::KernelContext* context) {
  const Probe& probe = *static_cast<Probe*>(kernel);
  void* stream = &stream;
  if (auto* status = ort::ComputeStream::call(probe.api, context, &stream)) return status;
  const int64_t shape[] = {4};
  ort::Value* value = nullptr;
  void* data = nullptr;
  if (auto* status = ort::Output::call(probe.api, context, 0, shape, 1, &value)) return status;
  if (auto* status = ort::TensorData::call(probe.api, value, &data)) return status;
  memcpy(data, probe.answers, sizeof probe.answers);
  static_cast<float*>(data)[3] = stream != nullptr;
  return nullptr;
}

ort::CustomOp make() {
  ort::CustomOp op = {};
  op.version = ort::kCustomOpVersion;
  op.GetName = [](const ort::CustomOp*) { return "probe"; };
  op.GetExecutionProviderType = [](const ort::CustomOp*) { return "CPUExecutionProvider"; };
  op.GetInputType = op.GetOutputType = [](const ort::CustomOp*, size_t) { return ort::kFloat; };
  op.GetInputTypeCount = op.GetOutputTypeCount = [](const ort::CustomOp*) { return size_t{1}; };
  op.GetInputCharacteristic = op.GetOutputCharacteristic = [](const ort::CustomOp*, size_t) {
    return ort::kRequired;
  };
  op.GetInputMemoryType = [](const ort::CustomOp*, size_t) { return ort::kDefaultMemory; };
  op.GetVariadicInputMinArity = op.GetVariadicInputHomogeneity = [](const ort::CustomOp*) { return 1; };
  op.GetVariadicOutputMinArity = op.GetVariadicOutputHomogeneity = [](const ort::CustomOp*) { return 1; };
  op.CreateKernelV2 = create;
  op.KernelComputeV2 = compute;
  op.KernelDestroy = [](void* kernel) { delete static_cast<Probe*>(kernel); };
  op.GetStartVersion = op.GetEndVersion = [](const ort::CustomOp*) { return 1; };
  op.GetAliasMap = op.GetMayInplace = [](int**, int**) { return size_t{0}; };
  op.ReleaseAliasMap = op.ReleaseMayInplace = [](int*, int*) {};
  return op;
}

}  // namespace

extern "C" KVG_EXPORT ort::Status* RegisterCustomOps(ort::SessionOptions* options,
                                                     const ort::ApiBase* base) {
  static const ort::CustomOp op = make();
  const ort::Api* api = base->GetApi(ort::kApiVersion);
  ort::CustomOpDomain* domain = nullptr;
  if (auto* status = ort::CreateCustomOpDomain::call(api, "probe", &domain)) return status;
  if (auto* status = ort::AddToDomain::call(api, domain, &op)) return status;
  return ort::AddDomain::call(api, options, domain);
}
