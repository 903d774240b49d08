#include "launch/step.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "cuda/driver.h"
#include "cuda/refuse.h"
#include "kvgraph/launch.h"
#include "launch/images.h"

namespace kvg::launch {
namespace {

using cuda::refuse;

constexpr size_t kScratchAlignment = 256;

size_t aligned(size_t bytes) { return (bytes + kScratchAlignment - 1) / kScratchAlignment * kScratchAlignment; }

// Throws the launcher's sentence.
template <class Entry, class... Arguments>
void call(Entry entry, Arguments... arguments) {
  char message[512] = "";
  const int32_t status = entry(arguments..., message, sizeof message);
  if (status != KVG_DONE) refuse(static_cast<kvg_status>(status), "%s", message);
}

// Of the thread's context, which the host runtime works in.
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

bool is_given(const Node& node, const kvg_tensor* operands, const char* input) {
  for (int i = 0; i < node.op->num_inputs; ++i)
    if (!std::strcmp(node.op->operands[i].name, input)) return operands[i].dtype != 0;
  return false;
}

void check_aliases(const Node& node, const kvg_tensor* operands) {
  const kvg_op& op = *node.op;
  for (int i = op.num_inputs; i < op.num_inputs + op.num_outputs; ++i) {
    const kvg_operand& output = op.operands[i];
    if (output.alias < 0 || !operands[i].dtype) continue;
    const void* const input = operands[output.alias].data;
    if (operands[i].data != input)
      refuse(KVG_REFUSED,
             "%s: %s: expected the address of %s %p, got %p: bind one buffer to both, a copy of the "
             "pool is never made",
             op.name, output.name, op.operands[output.alias].name, input, operands[i].data);
  }
}

// Extent of a symbolic dim of contract.h over the inputs; refuses where two of them disagree.
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
  const auto& known = node.kernels.dims;
  const auto found = dim.symbol < 0 ? known.end() : known.find(std::string(KVG_DIM_NAMES[dim.symbol]));
  if (dim.symbol >= 0 && found == known.end()) return;
  const int64_t expected = dim.symbol < 0 ? dim.value : found->second + dim.value;
  if (given != expected)
    refuse(KVG_REFUSED, "%s: %s: %s: expected %lld from the node's kernels, got %lld", node.op->name,
           operand.name, dim.symbol < 0 ? "dim" : KVG_DIM_NAMES[dim.symbol],
           static_cast<long long>(expected), static_cast<long long>(given));
}

// The longest new run and context that the host read, instead of their bounds.
void take_lengths(const Node& node, const kvg_tensor* operands, const int32_t* given, Sizes& sizes) {
  if (given[0] < 1 || given[1] < 1)
    refuse(KVG_REFUSED, "%s: max_lengths: expected at least 1 new token and a context of 1, got %d "
           "and %d", node.op->name, given[0], given[1]);
  sizes.max_new = given[0];
  sizes.max_context = given[1];
  const int64_t positions = extent_of(node, operands, KVG_DIM_MAX_POSITIONS);
  if (positions >= 0 && sizes.max_context > positions)
    refuse(KVG_REFUSED, "%s: max_lengths: expected contexts of at most the %lld positions of cos_sin, "
           "got %d", node.op->name, static_cast<long long>(positions), given[1]);
}

struct Arguments {
  kvg_argument list[KVG_MAX_LAUNCH_ARGUMENTS];

  Arguments(const Node& node, const kvg_tensor* operands, const Kernel& kernel,
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
        to.value.pointer = address(node, operands, kernel, parameter.index);
    }
  }

 private:
  static uint64_t address(const Node& node, const kvg_tensor* operands, const Kernel& kernel,
                          int operand) {
    if (!operands[operand].dtype)
      refuse(KVG_REFUSED, "%s: %s: expected an operand for kernel %s, got none", node.op->name,
             node.op->operands[operand].name, kernel.function.c_str());
    return reinterpret_cast<uint64_t>(operands[operand].data);
  }
};

void start(const Kernel& kernel, uint64_t module, const Launch& launch, const Arguments& arguments,
           void* stream) {
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

void check_operands(const Node& node, const kvg_tensor* operands) {
  for (int i = 0; i < node.op->num_inputs; ++i) {
    const kvg_operand& operand = node.op->operands[i];
    const kvg_tensor& given = operands[i];
    if (!given.dtype && operand.optional) continue;
    const int32_t dtype = node.kernels.dtype_of(operand);
    if (given.dtype != dtype)
      refuse(KVG_REFUSED, "%s: %s: expected %s from the node's kernels, got %s", node.op->name,
             operand.name, KVG_DTYPE_NAMES[dtype], KVG_DTYPE_NAMES[given.dtype]);
    if (given.rank != operand.rank)
      refuse(KVG_REFUSED, "%s: %s: expected rank %d, got %d", node.op->name, operand.name,
             operand.rank, given.rank);
    for (int axis = 0; axis < operand.rank; ++axis)
      check_dim(node, operand, operand.dims[axis], given.shape[axis]);
  }
}

Sizes sizes_of(const Node& node, const kvg_tensor* operands, const int32_t* max_lengths) {
  const auto extent = [&](int32_t symbol) { return extent_of(node, operands, symbol); };
  Sizes sizes{};
  sizes.batch_size = extent(KVG_DIM_BATCH_SIZE);
  sizes.total_seq_len = extent(KVG_DIM_TOTAL_SEQ_LEN);
  sizes.table_width = extent(KVG_DIM_MAX_NUM_PAGES);
  // A row has at most all new tokens, and what its pages hold.
  sizes.max_new = sizes.total_seq_len;
  sizes.max_context = sizes.table_width * node.kernels.dims.find("page_size")->second;
  if (max_lengths && sizes.total_seq_len) take_lengths(node, operands, max_lengths, sizes);
  return sizes;
}

size_t scratch_bytes(const Plan& plan) {
  size_t bytes = 0;
  for (int64_t elements : plan.scratch) bytes += aligned(static_cast<size_t>(elements) * sizeof(float));
  return bytes;
}

size_t scratch_bound(const Node& node, const kvg_tensor* most) {
  const Sizes sizes = sizes_of(node, most, nullptr);
  if (!is_given(node, most, "q")) return 0;
  size_t bytes = 0;
  for (const ArchKernels& arch : node.kernels.archs) {
    size_t needed = 0;
    for (int64_t elements : bound_scratch(arch.tiling, sizes).elements)
      needed += aligned(static_cast<size_t>(elements) * sizeof(float));
    bytes = std::max(bytes, needed);
  }
  return bytes;
}

void Device::load(const Kernels& kernels) {
  const int ordinal = current_device();
  if (arch_ && ordinal == ordinal_) return;
  kvg_cuda_device device = {};
  device.abi_version = KVG_LAUNCH_ABI_VERSION;
  device.struct_size = sizeof device;
  device.ordinal = ordinal;
  call(kvg_cuda_describe, &device);
  const ArchKernels& arch = kernels.on(device.major, device.minor);
  for (int role = 0; role < kNumRoles; ++role)
    if (arch.kernels[role].given()) modules_[role] = load_image(arch.kernels[role], arch.arch, ordinal);
  arch_ = &arch;
  ordinal_ = ordinal;
  multiprocessors_ = device.multiprocessors;
}

Plan Device::plan(const Node& node, const kvg_tensor* operands, const Sizes& sizes,
                  Multiprocessors count) {
  check_aliases(node, operands);
  load(node.kernels);
  Tiling tiling = arch_->tiling;
  if (count == Multiprocessors::kOwn) tiling.multiprocessors = multiprocessors_;
  return plan_step(tiling, sizes, node.attribute("layer", 0), is_given(node, operands, "k"),
                   is_given(node, operands, "q"));
}

void Device::run(const Node& node, const kvg_tensor* operands, const Plan& plan, void* scratch,
                 void* stream) const {
  void* parts[kNumScratch];
  auto* at = static_cast<char*>(scratch);
  for (int i = 0; i < kNumScratch; ++i) {
    parts[i] = at;
    at += aligned(static_cast<size_t>(plan.scratch[i]) * sizeof(float));
  }
  for (const Launch& launch : plan.launches) {
    const Kernel& kernel = arch_->kernels[launch.role];
    start(kernel, modules_[launch.role], launch, {node, operands, kernel, launch, parts}, stream);
  }
}

}  // namespace kvg::launch
