// Kernels of the CUDA provider. They plan and launch the cubins that kvgraph compiled, as
// TensorRT's plugins do (plugins/launch), on the provider's stream.
//
// The cubins are in two attributes of the node, both tensors of bytes: `kernels` (the record of
// launch.h) and `images`. TensorRT's plugins have them as fields. A folder named in the session's
// configuration would make the model smaller, but with attributes any host that has model.onnx and
// this library runs it, the manifest's hash of that file covers the cubins, and a model cannot be
// paired with the wrong ones.
// Each image is stored once, in one node; the others find it in the process by its SHA-256.
//
// This file was written from the runtime's public headers and is tested with a host of our own
// (tests/plugins/onnxruntime_host.cpp), because no machine at hand had the CUDA provider.
#include <algorithm>
#include <cstring>
#include <memory>
#include <mutex>

#include "common/base.h"
#include "launch/images.h"
#include "launch/step.h"
#include "onnxruntime/kernel.h"

namespace kvg::onnxruntime {
namespace {

constexpr char kMaxLengths[] = "max_lengths";

bool is_max_lengths(const kvg_operand& operand) { return !std::strcmp(operand.name, kMaxLengths); }

// Device memory of a step, ordered with the provider's stream. It is freed as soon as the launches
// that use it are enqueued: the provider reuses it only for work that waits for them.
class Scratch {
 public:
  Scratch(const ort::Api* api, ort::Allocator* allocator) : api_(api), allocator_(allocator) {}
  ~Scratch() {
    if (data_) allocator_->Free(allocator_, data_);
  }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;

  ort::Status* take(const ort::KernelContext* context, size_t bytes) {
    if (!bytes) return nullptr;
    return ort::ScratchBuffer::call(api_, context, allocator_->Info(allocator_), bytes, &data_);
  }
  void* data() const { return data_; }

 private:
  const ort::Api* const api_;
  ort::Allocator* const allocator_;
  void* data_ = nullptr;
};

struct CudaKernel : Kernel {
  launch::Node node;
  std::shared_ptr<const std::string> images;
  ort::Allocator* allocator = nullptr;  // for the provider's device memory
  std::mutex mutex;                     // guards `device`, which steps on several threads use
  launch::Device device;

  using Kernel::Kernel;
  ~CudaKernel() {
    if (allocator) ort::ReleaseAllocator::call(api, allocator);
  }

  ort::Status* read_node(const ort::KernelInfo* info);
  ort::Status* compute(ort::KernelContext* context);

 private:
  ort::Status* read_bytes(const ort::KernelInfo* info, const char* name, std::string& bytes) const;
  const int32_t* max_lengths(const kvg_tensor* operands) const;
};

// Reads an attribute of the node into `bytes`, which do not change if there is no such attribute.
// Throws a Refusal of an attribute that is no row of bytes.
ort::Status* CudaKernel::read_bytes(const ort::KernelInfo* info, const char* name,
                                    std::string& bytes) const {
  ort::Allocator* host = nullptr;
  ort::Value* made = nullptr;
  KVG_TRY(ort::DefaultAllocator::call(api, &host));
  if (ort::Status* status = ort::AttributeTensor::call(api, info, name, host, &made))
    return unless_missing(api, status);
  const auto release = [this](ort::Value* value) { ort::ReleaseValue::call(api, value); };
  const std::unique_ptr<ort::Value, decltype(release)> value(made, release);
  kvg_tensor tensor = {};
  ort::ElementType type = ort::kUndefined;
  KVG_TRY(read(value.get(), tensor, &type));
  if (tensor.rank != 1 || (type != ort::kUint8 && type != ort::kInt8))
    refuse("%s: %s: expected a row of uint8, got rank %d of ONNX element type %d", op->name, name,
           tensor.rank, type);
  bytes.assign(static_cast<const char*>(tensor.data), static_cast<size_t>(tensor.shape[0]));
  return nullptr;
}

ort::Status* CudaKernel::read_node(const ort::KernelInfo* info) {
  std::string kernels, cubins;
  KVG_TRY(read_attributes(info));
  KVG_TRY(read_bytes(info, "kernels", kernels));
  KVG_TRY(read_bytes(info, "images", cubins));
  if (kernels.empty())
    refuse(
        "%s: expected attribute kernels, a tensor of bytes, for the CUDA provider, got none: "
        "compile the model for a cuda target",
        op->name);
  KVG_TRY(ort::KernelAllocator::call(api, info, ort::kDefaultMemory, &allocator));
  bool stores = false;
  for (int i = 0; i < op->num_inputs; ++i) stores |= !std::strcmp(op->operands[i].name, "k");
  node.op = op;
  std::copy_n(attributes, kMaxAttributes, node.attributes);
  node.kernels = launch::read_kernels(*op, kernels, stores);
  launch::check_attributes(node);
  images = std::make_shared<const std::string>(std::move(cubins));
  launch::publish(images);
  return nullptr;
}

// The first row of input max_lengths; null if the op has no such input.
const int32_t* CudaKernel::max_lengths(const kvg_tensor* operands) const {
  for (int i = 0; i < op->num_inputs; ++i) {
    if (!is_max_lengths(op->operands[i])) continue;
    if (operands[i].shape[0] < 1)
      refuse(KVG_REFUSED, "%s: max_lengths: expected at least one step, got none", op->name);
    return static_cast<const int32_t*>(operands[i].data);
  }
  return nullptr;
}

ort::Status* CudaKernel::compute(ort::KernelContext* context) {
  kvg_tensor operands[kMaxOperands] = {};
  void* stream = nullptr;
  KVG_TRY(read_operands(context, operands));
  KVG_TRY(ort::ComputeStream::call(api, context, &stream));
  return guarded(api, [&]() -> ort::Status* {
    launch::check_operands(node, operands);
    const kvg_sizes sizes = launch::sizes_of(node, operands, max_lengths(operands));
    std::lock_guard<std::mutex> lock(mutex);
    const kvg_plan plan = device.plan(node, operands, sizes, launch::Multiprocessors::kOwn);
    Scratch scratch(api, allocator);
    KVG_TRY(scratch.take(context, launch::scratch_bytes(plan)));
    device.run(node, operands, plan, scratch.data(), stream);
    return nullptr;
  });
}

ort::Status* create_kernel(const ort::CustomOp* op, const ort::Api* api,
                           const ort::KernelInfo* info, void** kernel) {
  return guarded(api, [&]() -> ort::Status* {
    auto made = std::make_unique<CudaKernel>(api, variant(op));
    KVG_TRY(made->read_node(info));
    *kernel = made.release();
    return nullptr;
  });
}

}  // namespace

// max_lengths stays in host memory, because the host plans with it.
void use_cuda(Variant& v) {
  v.entry = nullptr;
  v.GetExecutionProviderType = [](const ort::CustomOp*) { return "CUDAExecutionProvider"; };
  v.GetInputMemoryType = [](const ort::CustomOp* op, size_t i) {
    return is_max_lengths(variant(op).op->operands[i]) ? ort::kCpuInput : ort::kDefaultMemory;
  };
  v.CreateKernelV2 = create_kernel;
  v.KernelComputeV2 = [](void* kernel, ort::KernelContext* context) {
    return static_cast<CudaKernel*>(kernel)->compute(context);
  };
  v.KernelDestroy = [](void* kernel) { delete static_cast<CudaKernel*>(kernel); };
}

}  // namespace kvg::onnxruntime
