#include "launch/step.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>

#include "common/base.h"
#include "cuda/driver.h"
#include "kvgraph/launch.h"
#include "launch/images.h"

namespace kvg::launch {
namespace {

constexpr size_t kScratchAlignment = 256;

size_t aligned(size_t bytes) { return (bytes + kScratchAlignment - 1) / kScratchAlignment * kScratchAlignment; }

// Calls an entry point of the launcher; throws its sentence if it refuses.
template <class Entry, class... Arguments>
void call(Entry entry, Arguments... arguments) {
  char message[512] = "";
  const int32_t status = entry(arguments..., message, sizeof message);
  if (status != KVG_DONE) refuse(static_cast<kvg_status>(status), "%s", message);
}

// The thread's context, which the host runtime works in; null if there is none.
const cuda::Context* current_context() {
  const cuda::Driver& driver = cuda::driver();
  cuda::Context* context = nullptr;
  driver.check(driver.cuCtxGetCurrent(&context), "cuCtxGetCurrent");
  return context;
}

int current_device() {
  cuda::Device device = 0;
  cuda::driver().check(cuda::driver().cuCtxGetDevice(&device), "cuCtxGetDevice");
  return device;
}

uint64_t load_image(const kvg_kernel& kernel, const cuda::Arch& arch, int ordinal) {
  Digest digest;
  std::copy_n(kernel.sha256, digest.size(), digest.begin());
  const Image found = find_image(digest, kernel.function);
  kvg_cuda_image image = {};
  image.abi_version = KVG_LAUNCH_ABI_VERSION;
  image.struct_size = sizeof image;
  image.data = found.data;
  image.size = found.size;
  image.arch = arch.name.c_str();
  image.sha256 = kernel.sha256;
  image.device = ordinal;
  uint64_t module = 0;
  call(kvg_cuda_load, &image, &module);
  call(kvg_cuda_prepare, module, kernel.function, kernel.shared_bytes);
  return module;
}

bool is_given(const Node& node, const kvg_tensor* operands, const char* input) {
  for (int i = 0; i < node.op->num_inputs; ++i)
    if (!std::strcmp(node.op->operands[i].name, input)) return operands[i].dtype != 0;
  return false;
}

void check_aliases(const Node& node, const kvg_tensor* operands) {
  const kvg_op& op = *node.op;
  for (int i = op.num_inputs; i < op.num_inputs + op.num_outputs; ++i)
    if (op.operands[i].alias >= 0 && operands[i].dtype) check_alias(op, i, operands);
}

// Extent of a symbolic dim of contract.h in the inputs, -1 if none has it. Refuses if two disagree.
int64_t extent_of(const Node& node, const kvg_tensor* operands, int32_t symbol) {
  int64_t extent = -1;
  const char* owner = nullptr;
  for (int i = 0; i < node.op->num_inputs; ++i) {
    const kvg_operand& operand = node.op->operands[i];
    for (int axis = 0; axis < operand.rank && operands[i].dtype; ++axis) {
      if (operand.dims[axis].symbol != symbol) continue;
      const int64_t given = operands[i].shape[axis] - operand.dims[axis].value;
      if (owner && given != extent)
        refuse(KVG_REFUSED, "%s: %s: dim %s: expected %lld as %s has it, got %lld", node.op->name,
               operand.name, KVG_DIM_NAMES[symbol], static_cast<long long>(extent), owner,
               static_cast<long long>(given));
      owner = operand.name;
      extent = given;
    }
  }
  return extent;
}

void check_dim(const Node& node, const kvg_operand& operand, const kvg_dim& dim, int64_t given) {
  const int64_t expected = node.kernels.extent_of(dim);
  if (expected && given != expected)
    refuse(KVG_REFUSED, "%s: %s: %s: expected %lld from the node's kernels, got %lld", node.op->name,
           operand.name, dim.symbol < 0 ? "dim" : KVG_DIM_NAMES[dim.symbol],
           static_cast<long long>(expected), static_cast<long long>(given));
}

struct Arguments {
  kvg_argument list[KVG_MAX_PARAMETERS];

  Arguments(const Node& node, const kvg_tensor* operands, const kvg_kernel& kernel,
            const kvg_planned& launch, void* const* scratch) {
    for (uint32_t i = 0; i < kernel.num_parameters; ++i) {
      const kvg_parameter& parameter = kernel.parameters[i];
      const bool value = parameter.kind == KVG_PARAMETER_VALUE;
      kvg_argument& to = list[i];
      to.kind = value ? KVG_ARGUMENT_INT32 : KVG_ARGUMENT_POINTER;
      to.alignment = value ? 0 : parameter.alignment;
      if (value)
        to.value.i32 = static_cast<int32_t>(launch.values[parameter.index]);
      else if (parameter.kind == KVG_PARAMETER_SCRATCH)
        to.value.pointer = reinterpret_cast<uint64_t>(scratch[parameter.index]);
      else
        to.value.pointer = address(node, operands, kernel, parameter.index);
    }
  }

 private:
  static uint64_t address(const Node& node, const kvg_tensor* operands, const kvg_kernel& kernel,
                          int operand) {
    if (!operands[operand].dtype)
      refuse(KVG_REFUSED, "%s: %s: expected an operand for kernel %s, got none", node.op->name,
             node.op->operands[operand].name, kernel.function);
    return reinterpret_cast<uint64_t>(operands[operand].data);
  }
};

void start(const kvg_kernel& kernel, uint64_t module, const kvg_planned& launch,
           const Arguments& arguments, void* stream) {
  kvg_launch call_ = {};
  call_.abi_version = KVG_LAUNCH_ABI_VERSION;
  call_.struct_size = sizeof call_;
  call_.module = module;
  call_.function = kernel.function;
  call_.arguments = arguments.list;
  call_.num_arguments = kernel.num_parameters;
  for (int axis = 0; axis < 2; ++axis)
    call_.grid[axis] = static_cast<uint32_t>(std::min<int64_t>(launch.grid[axis], UINT32_MAX));
  call_.grid[2] = 1;
  call_.num_warps = kernel.num_warps;
  call_.shared_bytes = kernel.shared_bytes;
  call_.stream = stream;
  call(kvg_cuda_launch, &call_);
}

kvg_plan plan_of(const Node& node, const ArchKernels& arch, const kvg_sizes& sizes) {
  kvg_plan plan = {};
  plan.op = node.op->name;
  plan.constants = node.kernels.constants;
  plan.tiling = arch.tiling;
  plan.sizes = sizes;
  plan.layer = static_cast<int32_t>(node.attribute("layer", 0));
  return plan;
}

}  // namespace

int64_t Node::attribute(const char* name, int64_t otherwise) const {
  for (int i = 0; i < op->num_attributes; ++i)
    if (!std::strcmp(op->attributes[i].name, name)) return attributes[i].i;
  return otherwise;
}

void check_attributes(const Node& node) {
  for (int i = 0; i < node.op->num_attributes; ++i) {
    const kvg_attribute& spec = node.op->attributes[i];
    const auto made = node.kernels.attributes.find(spec.name);
    if (made == node.kernels.attributes.end()) continue;
    const double given =
        spec.is_float ? node.attributes[i].f : static_cast<double>(node.attributes[i].i);
    if (std::fabs(given - made->second) > 1e-6 * std::fabs(made->second))
      refuse(KVG_REFUSED, "%s: %s: expected %g from the node's kernels, got %g", node.op->name,
             spec.name, made->second, given);
  }
}

void check_taken(const Node& node, int operand) {
  const kvg_operand& spec = node.op->operands[operand];
  if (spec.optional && !(node.kernels.taken >> operand & 1u))
    refuse(KVG_REFUSED, "%s: %s: expected none, as the node's kernels take none, got one: compile the "
           "model again with it",
           node.op->name, spec.name);
}

void check_operands(const Node& node, const kvg_tensor* operands) {
  for (int i = 0; i < node.op->num_inputs; ++i) {
    const kvg_operand& operand = node.op->operands[i];
    const kvg_tensor& given = operands[i];
    if (!given.dtype && operand.optional) continue;
    check_taken(node, i);
    const int32_t dtype = node.kernels.dtype_of(operand);
    if (given.dtype != dtype)
      refuse(KVG_REFUSED, "%s: %s: expected %s from the node's kernels, got %s", node.op->name,
             operand.name, kvg_dtype_name(dtype), kvg_dtype_name(given.dtype));
    if (given.rank != operand.rank)
      refuse(KVG_REFUSED, "%s: %s: expected rank %d, got %d", node.op->name, operand.name,
             operand.rank, given.rank);
    for (int axis = 0; axis < operand.rank; ++axis)
      check_dim(node, operand, operand.dims[axis], given.shape[axis]);
  }
}

kvg_sizes sizes_of(const Node& node, const kvg_tensor* operands, const int32_t* max_lengths) {
  const auto extent = [&](int32_t symbol) { return extent_of(node, operands, symbol); };
  kvg_sizes sizes = {};
  sizes.batch_size = extent(KVG_DIM_BATCH_SIZE);
  sizes.total_seq_len = extent(KVG_DIM_TOTAL_SEQ_LEN);
  sizes.table_width = extent(KVG_DIM_MAX_NUM_PAGES);
  // Bounds: a row has at most all new tokens, and at most the context that its pages can hold.
  sizes.max_new = sizes.total_seq_len;
  sizes.max_context = sizes.table_width * node.kernels.constants.page_size;
  if (!max_lengths) return sizes;
  sizes.max_new = max_lengths[0];
  sizes.max_context = max_lengths[1];
  sizes.max_positions = std::max<int64_t>(extent(KVG_DIM_MAX_POSITIONS), 0);
  return sizes;
}

size_t scratch_bytes(const kvg_plan& plan) {
  size_t bytes = 0;
  for (int64_t elements : plan.scratch) bytes += aligned(static_cast<size_t>(elements) * sizeof(float));
  return bytes;
}

size_t scratch_bound(const Node& node, const kvg_tensor* most) {
  const kvg_sizes sizes = sizes_of(node, most, nullptr);
  if (!is_given(node, most, "q")) return 0;
  size_t bytes = 0;
  for (const ArchKernels& arch : node.kernels.archs) {
    kvg_plan plan = plan_of(node, arch, sizes);
    bound_scratch(plan);
    bytes = std::max(bytes, scratch_bytes(plan));
  }
  return bytes;
}

void Device::load(const Kernels& kernels) {
  const cuda::Context* const context = current_context();
  if (arch_ && context == context_) return;
  const int ordinal = context ? current_device() : 0;
  kvg_cuda_device device = {};
  device.abi_version = KVG_LAUNCH_ABI_VERSION;
  device.struct_size = sizeof device;
  device.ordinal = ordinal;
  call(kvg_cuda_describe, &device);
  const ArchKernels& arch = kernels.on(device.major, device.minor);
  std::array<uint64_t, KVG_ROLE_COUNT> modules = {};
  for (int role = 0; role < KVG_ROLE_COUNT; ++role)
    if (given(arch.kernels[role]))
      modules[role] = load_image(arch.kernels[role], arch.arch, ordinal);
  // Nothing fails from here on: a step after one that failed has all kernels of one context.
  modules_ = modules;
  arch_ = &arch;
  context_ = context;
  multiprocessors_ = device.multiprocessors;
}

kvg_plan Device::plan(const Node& node, const kvg_tensor* operands, const kvg_sizes& sizes,
                      Multiprocessors count) {
  check_aliases(node, operands);
  load(node.kernels);
  kvg_plan plan = plan_of(node, *arch_, sizes);
  if (count == Multiprocessors::kOwn) plan.tiling.multiprocessors = multiprocessors_;
  plan.stores = is_given(node, operands, "k");
  plan.attends = is_given(node, operands, "q");
  plan_step(plan);
  return plan;
}

void Device::run(const Node& node, const kvg_tensor* operands, const kvg_plan& plan, void* scratch,
                 void* stream) const {
  void* parts[KVG_SCRATCH_COUNT];
  auto* at = static_cast<char*>(scratch);
  for (int i = 0; i < KVG_SCRATCH_COUNT; ++i) {
    parts[i] = at;
    at += aligned(static_cast<size_t>(plan.scratch[i]) * sizeof(float));
  }
  for (int i = 0; i < plan.num_launches; ++i) {
    const kvg_planned& launch = plan.launches[i];
    const kvg_kernel& kernel = arch_->kernels[launch.role];
    start(kernel, modules_[launch.role], launch, {node, operands, kernel, launch, parts}, stream);
  }
}

}  // namespace kvg::launch
