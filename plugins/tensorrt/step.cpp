#include "tensorrt/step.h"

#include <algorithm>

#include "cuda/driver.h"
#include "kvgraph/launch.h"
#include "tensorrt/images.h"
#include "tensorrt/report.h"

namespace kvg::tensorrt {
namespace {

constexpr size_t kScratchAlignment = 256;

size_t aligned(size_t bytes) { return (bytes + kScratchAlignment - 1) / kScratchAlignment * kScratchAlignment; }

// Throws the launcher's sentence.
template <class Entry, class... Arguments>
void call(Entry entry, Arguments... arguments) {
  char message[512] = "";
  const int32_t status = entry(arguments..., message, sizeof message);
  if (status != KVG_DONE) refuse(static_cast<kvg_status>(status), "%s", message);
}

// Of the thread's context, which TensorRT runs in.
int current_device() {
  const cuda::Driver& driver = cuda::driver();
  cuda::Context* context = nullptr;
  driver.check(driver.cuCtxGetCurrent(&context), "cuCtxGetCurrent");
  if (!context) return 0;
  cuda::Device device = 0;
  driver.check(driver.cuCtxGetDevice(&device), "cuCtxGetDevice");
  return device;
}

uint64_t load_image(const Kernel& kernel, const cuda::Arch& arch, int ordinal) {
  const Image found = find_image(kernel.digest, kernel.function.c_str());
  kvg_cuda_image image = {};
  image.abi_version = KVG_LAUNCH_ABI_VERSION;
  image.struct_size = sizeof image;
  image.data = found.data;
  image.size = found.size;
  image.arch = arch.name.c_str();
  image.sha256 = kernel.digest.data();
  image.device = ordinal;
  uint64_t module = 0;
  call(kvg_cuda_load, &image, &module);
  call(kvg_cuda_prepare, module, kernel.function.c_str(), kernel.shared_bytes);
  return module;
}

void check_aliases(const Settings& settings, const Tensors& tensors) {
  for (size_t i = static_cast<size_t>(settings.num_inputs); i < settings.operands.size(); ++i) {
    const kvg_operand& output = settings.operand(static_cast<int>(i));
    if (output.alias < 0) continue;
    const void* const input = tensors.data[settings.position(output.alias)];
    if (tensors.data[i] != input)
      refuse(KVG_REFUSED,
             "%s: %s: expected the address of %s %p, got %p: bind one buffer to both, a copy of the "
             "pool is never made",
             settings.op->name, output.name, settings.op->operands[output.alias].name, input,
             tensors.data[i]);
  }
}

Sizes sizes_of(const Settings& settings, const trt::Dims* const* dims, const Kernels& kernels) {
  const auto extent = [&](int32_t symbol) { return extent_of(settings, dims, symbol); };
  Sizes sizes{};
  sizes.batch_size = extent(KVG_DIM_BATCH_SIZE);
  sizes.total_seq_len = extent(KVG_DIM_TOTAL_SEQ_LEN);
  sizes.table_width = extent(KVG_DIM_MAX_NUM_PAGES);
  // max_lengths is the device's: a row has at most all new tokens, and what its pages hold.
  sizes.max_new = sizes.total_seq_len;
  sizes.max_context = sizes.table_width * kernels.dims.find("page_size")->second;
  return sizes;
}

struct Arguments {
  kvg_argument list[KVG_MAX_LAUNCH_ARGUMENTS];

  Arguments(const Settings& settings, const Tensors& tensors, const Kernel& kernel,
            const Launch& launch, void* const* scratch) {
    if (kernel.parameters.size() > KVG_MAX_LAUNCH_ARGUMENTS)
      refuse(KVG_REFUSED, "%s: expected at most %d parameters, got %zu", kernel.function.c_str(),
             KVG_MAX_LAUNCH_ARGUMENTS, kernel.parameters.size());
    for (size_t i = 0; i < kernel.parameters.size(); ++i) {
      const Parameter& parameter = kernel.parameters[i];
      kvg_argument& to = list[i];
      to.kind = parameter.kind == Parameter::kValue ? KVG_ARGUMENT_INT32 : KVG_ARGUMENT_POINTER;
      to.alignment = parameter.alignment;
      if (parameter.kind == Parameter::kValue)
        to.value.i32 = static_cast<int32_t>(launch.values[parameter.index]);
      else if (parameter.kind == Parameter::kScratch)
        to.value.pointer = reinterpret_cast<uint64_t>(scratch[parameter.index]);
      else
        to.value.pointer = address(settings, tensors, kernel, parameter.index);
    }
  }

 private:
  static uint64_t address(const Settings& settings, const Tensors& tensors, const Kernel& kernel,
                          int operand) {
    const int position = settings.position(operand);
    if (position < 0)
      refuse(KVG_REFUSED, "%s: %s: expected an operand for kernel %s, got none", settings.op->name,
             settings.op->operands[operand].name, kernel.function.c_str());
    return reinterpret_cast<uint64_t>(tensors.data[position]);
  }
};

void start(const Kernel& kernel, uint64_t module, const Launch& launch, const Arguments& arguments,
           trt::Stream* stream) {
  kvg_launch call_ = {};
  call_.abi_version = KVG_LAUNCH_ABI_VERSION;
  call_.struct_size = sizeof call_;
  call_.module = module;
  call_.function = kernel.function.c_str();
  call_.arguments = arguments.list;
  call_.num_arguments = static_cast<uint32_t>(kernel.parameters.size());
  for (int axis = 0; axis < 2; ++axis)
    call_.grid[axis] = static_cast<uint32_t>(std::min<int64_t>(launch.grid[axis], UINT32_MAX));
  call_.grid[2] = 1;
  call_.num_warps = kernel.num_warps;
  call_.shared_bytes = kernel.shared_bytes;
  call_.stream = stream;
  call(kvg_cuda_launch, &call_);
}

}  // namespace

int64_t extent_of(const Settings& settings, const trt::Dims* const* dims, int32_t symbol) {
  int64_t extent = -1;
  const char* owner = nullptr;
  for (int i = 0; i < settings.num_inputs; ++i)
    for (int axis = 0; axis < settings.operand(i).rank; ++axis) {
      const kvg_dim& dim = settings.operand(i).dims[axis];
      if (dim.symbol != symbol) continue;
      const int64_t given = dims[i]->extent[axis] - dim.value;
      if (owner && given != extent)
        refuse(KVG_REFUSED, "%s: %s: dim %s: expected %lld as %s has it, got %lld", settings.op->name,
               settings.operand(i).name, KVG_DIM_NAMES[symbol], static_cast<long long>(extent), owner,
               static_cast<long long>(given));
      owner = settings.operand(i).name;
      extent = given;
    }
  return extent;
}

size_t workspace_bytes(const Settings& settings, const trt::Dims* most) {
  const trt::Dims* dims[kMaxOperands];
  for (int i = 0; i < settings.num_inputs; ++i) dims[i] = &most[i];
  const Sizes sizes = sizes_of(settings, dims, settings.kernels);
  if (!settings.has("q")) return 0;
  size_t bytes = 0;
  for (const ArchKernels& arch : settings.kernels.archs) {
    size_t needed = 0;
    for (int64_t elements : bound_scratch(arch.tiling, sizes).elements)
      needed += aligned(static_cast<size_t>(elements) * sizeof(float));
    bytes = std::max(bytes, needed);
  }
  return bytes;
}

void Device::load(const Settings& settings) {
  const int ordinal = current_device();
  if (arch_ && ordinal == ordinal_) return;
  kvg_cuda_device device = {};
  device.abi_version = KVG_LAUNCH_ABI_VERSION;
  device.struct_size = sizeof device;
  device.ordinal = ordinal;
  call(kvg_cuda_describe, &device);
  const ArchKernels& arch = settings.kernels.on(device.major, device.minor);
  for (int role = 0; role < kNumRoles; ++role)
    if (arch.kernels[role].given()) modules_[role] = load_image(arch.kernels[role], arch.arch, ordinal);
  arch_ = &arch;
  ordinal_ = ordinal;
}

void Device::run(const Settings& settings, const Tensors& tensors, void* workspace,
                 trt::Stream* stream) {
  check_aliases(settings, tensors);
  const trt::Dims* dims[kMaxOperands];
  for (int i = 0; i < settings.num_inputs; ++i) dims[i] = &tensors.desc[i]->dims;
  const Sizes sizes = sizes_of(settings, dims, settings.kernels);
  load(settings);
  const Plan plan = plan_step(arch_->tiling, sizes, settings.attribute("layer", 0),
                              settings.has("k"), settings.has("q"));
  void* scratch[kNumScratch];
  auto* at = static_cast<char*>(workspace);
  for (int i = 0; i < kNumScratch; ++i) {
    scratch[i] = at;
    at += aligned(static_cast<size_t>(plan.scratch[i]) * sizeof(float));
  }
  for (const Launch& launch : plan.launches) {
    const Kernel& kernel = arch_->kernels[launch.role];
    start(kernel, modules_[launch.role], launch, {settings, tensors, kernel, launch, scratch}, stream);
  }
}

}  // namespace kvg::tensorrt
