// Kernels of the CPU provider: they run the kernels of plugins/cpu on the host's threads.
#include <memory>

#include "onnxruntime/kernel.h"

namespace kvg::onnxruntime {
namespace {

// The host's threads, for a kernel's parallel_for.
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

struct CpuKernel : Kernel {
  using Kernel::Kernel;

  ort::Status* compute(ort::KernelContext* context) const;
};

ort::Status* CpuKernel::compute(ort::KernelContext* context) const {
  kvg_tensor operands[kMaxOperands] = {};
  KVG_TRY(read_operands(context, operands));
  Threads threads{api, context, nullptr};
  kvg_call call = {};
  call.abi_version = KVG_ABI_VERSION;
  call.struct_size = sizeof call;
  call.operands = operands;
  call.attributes = attributes;
  call.num_operands = static_cast<uint32_t>(op->num_inputs + op->num_outputs);
  call.num_attributes = static_cast<uint32_t>(op->num_attributes);
  call.parallel_for = Threads::run;
  call.host = &threads;
  char sentence[512] = "";
  const int32_t refused = variant.entry(&call, sentence, sizeof sentence);
  if (threads.failure || !refused) return threads.failure;
  return ort::CreateStatus::call(api, ort::kInvalidArgument, sentence);
}

ort::Status* create_kernel(const ort::CustomOp* op, const ort::Api* api,
                           const ort::KernelInfo* info, void** kernel) {
  return guarded(api, [&]() -> ort::Status* {
    auto made = std::make_unique<CpuKernel>(api, variant(op));
    KVG_TRY(made->read_attributes(info));
    KVG_TRY(made->read_constants(info));
    *kernel = made.release();
    return nullptr;
  });
}

}  // namespace

void use_cpu(Variant& v) {
  v.GetExecutionProviderType = [](const ort::CustomOp*) { return "CPUExecutionProvider"; };
  v.GetInputMemoryType = [](const ort::CustomOp*, size_t) { return ort::kDefaultMemory; };
  v.CreateKernelV2 = create_kernel;
  v.KernelComputeV2 = [](void* kernel, ort::KernelContext* context) {
    return static_cast<const CpuKernel*>(kernel)->compute(context);
  };
  v.KernelDestroy = [](void* kernel) { delete static_cast<CpuKernel*>(kernel); };
}

}  // namespace kvg::onnxruntime
