#include "tensorrt/plugin.h"

#include <algorithm>
#include <cstring>
#include <new>

#include "tensorrt/report.h"

namespace kvg::tensorrt {
namespace {

// TensorRT's types, indexed by kvg_dtype; no operand has code 0.
constexpr trt::DataType kTypes[] = {trt::DataType::kFLOAT, KVG_DTYPE_TENSORRT(trt::DataType::)};
constexpr int kNumDtypes = sizeof kTypes / sizeof *kTypes;

const char* name_of(trt::DataType type) {
  for (int code = 1; code < kNumDtypes; ++code)
    if (kTypes[code] == type) return KVG_DTYPE_NAMES[code];
  return "a type that no kernel takes";
}

void check_count(const Settings& settings, int32_t num_in, int32_t num_out) {
  if (num_in != settings.num_inputs || num_out != settings.num_outputs())
    refuse(KVG_REFUSED, "%s: expected %d inputs and %d outputs from its fields, got %d and %d",
           settings.op->name, settings.num_inputs, settings.num_outputs(), num_in, num_out);
}

void check_type(const Settings& settings, int position, trt::DataType given) {
  const kvg_operand& operand = settings.operand(position);
  const int dtype = settings.kernels.dtype_of(operand);
  if (kTypes[dtype] != given)
    refuse(KVG_REFUSED, "%s: %s: expected %s from the node's kernels, got %s", settings.op->name,
           operand.name, KVG_DTYPE_NAMES[dtype], name_of(given));
}

// Refuses unless a dim that kernels were compiled for is the same constant in the graph.
void check_dim(const Settings& settings, const kvg_operand& operand, const kvg_dim& dim,
               const trt::Dimension& given) {
  const int64_t expected = settings.kernels.extent_of(dim);
  if (!expected) return;
  const char* name = dim.symbol < 0 ? "dim" : KVG_DIM_NAMES[dim.symbol];
  if (!given.is_constant())
    refuse(KVG_REFUSED, "%s: %s: %s: expected %lld from the node's kernels, got a dim that is known "
           "at run time only", settings.op->name, operand.name, name, static_cast<long long>(expected));
  if (given.value() != expected)
    refuse(KVG_REFUSED, "%s: %s: %s: expected %lld from the node's kernels, got %lld",
           settings.op->name, operand.name, name, static_cast<long long>(expected),
           static_cast<long long>(given.value()));
}

void check_dims(const Settings& settings, const trt::DimsExprs* in) {
  for (int i = 0; i < settings.num_inputs; ++i) {
    const kvg_operand& operand = settings.operand(i);
    if (in[i].count != operand.rank)
      refuse(KVG_REFUSED, "%s: %s: expected rank %d, got %d", settings.op->name, operand.name,
             operand.rank, in[i].count);
    for (int axis = 0; axis < operand.rank; ++axis)
      check_dim(settings, operand, operand.dims[axis], *in[i].extent[axis]);
  }
}

// Returns the equal dim of an input, or else the constant that kernels were compiled for.
const trt::Dimension* dim_of(const Settings& settings, const trt::DimsExprs* in, const kvg_dim& dim,
                             trt::ExprBuilder& builder) {
  for (int i = 0; i < settings.num_inputs; ++i)
    for (int axis = 0; axis < settings.operand(i).rank; ++axis) {
      const kvg_dim& found = settings.operand(i).dims[axis];
      if (found.symbol == dim.symbol && found.value == dim.value) return in[i].extent[axis];
    }
  const int64_t known = settings.kernels.extent_of(dim);
  if (!known)
    refuse(KVG_REFUSED, "%s: %s: expected an input that has it, got none", settings.op->name,
           KVG_DIM_NAMES[dim.symbol]);
  return builder.constant(known);
}

// Makes the kvg_tensor of an operand, as launches take it.
kvg_tensor tensor_of(const Settings& settings, int position, const trt::Dims& dims, void* data) {
  kvg_tensor made = {data, settings.kernels.dtype_of(settings.operand(position)), dims.count, {}};
  std::copy_n(dims.extent, std::min(dims.count, KVG_MAX_RANK), made.shape);
  return made;
}

}  // namespace

Plugin::Plugin(std::shared_ptr<const Settings> settings, trt::Phase phase)
    : settings_(std::move(settings)),
      serialized_(std::make_shared<const Serialized>(*settings_)),
      phase_(phase) {}

trt::Capable* Plugin::capability(trt::Capability type) noexcept {
  switch (type) {
    case trt::Capability::kCore: return static_cast<trt::PluginCore*>(this);
    case trt::Capability::kBuild: return static_cast<trt::PluginBuild*>(this);
    case trt::Capability::kRuntime: return static_cast<trt::PluginRuntime*>(this);
  }
  return nullptr;
}

trt::Plugin* Plugin::clone() noexcept { return new (std::nothrow) Plugin(*this); }

trt::Plugin* Plugin::attach(trt::ResourceContext*) noexcept { return clone(); }

int32_t Plugin::configure(const trt::DynamicTensorDesc* in, int32_t num_in,
                          const trt::DynamicTensorDesc*, int32_t num_out) noexcept {
  return guarded([&] {
    check_count(*settings_, num_in, num_out);
    for (int i = 0; i < num_in; ++i) check_type(*settings_, i, in[i].desc.type);
  });
}

int32_t Plugin::output_types(trt::DataType* out, int32_t num_out, const trt::DataType* in,
                             int32_t num_in) const noexcept {
  return guarded([&] {
    check_count(*settings_, num_in, num_out);
    for (int i = 0; i < num_in; ++i) check_type(*settings_, i, in[i]);
    for (int i = 0; i < num_out; ++i)
      out[i] = kTypes[settings_->kernels.dtype_of(settings_->operand(num_in + i))];
  });
}

int32_t Plugin::output_shapes(const trt::DimsExprs* in, int32_t num_in, const trt::DimsExprs*,
                              int32_t, trt::DimsExprs* out, int32_t num_out,
                              trt::ExprBuilder& builder) noexcept {
  return guarded([&] {
    check_count(*settings_, num_in, num_out);
    check_dims(*settings_, in);
    for (int i = 0; i < num_out; ++i) {
      const kvg_operand& output = settings_->operand(num_in + i);
      if (output.alias >= 0) {
        out[i] = in[settings_->position(output.alias)];
        continue;
      }
      out[i].count = output.rank;
      for (int axis = 0; axis < output.rank; ++axis)
        out[i].extent[axis] = dim_of(*settings_, in, output.dims[axis], builder);
    }
  });
}

bool Plugin::supports_format(int32_t position, const trt::DynamicTensorDesc* in_out, int32_t num_in,
                             int32_t num_out) noexcept {
  if (position < 0 || position >= num_in + num_out ||
      position >= static_cast<int32_t>(settings_->operands.size()))
    return false;
  const trt::TensorDesc& desc = in_out[position].desc;
  const int dtype = settings_->kernels.dtype_of(settings_->operand(position));
  return desc.format == trt::Format::kLinear && desc.type == kTypes[dtype];
}

size_t Plugin::workspace_size(const trt::DynamicTensorDesc* in, int32_t num_in,
                              const trt::DynamicTensorDesc*, int32_t) const noexcept {
  size_t bytes = 0;
  guarded([&] {
    check_count(*settings_, num_in, settings_->num_outputs());
    kvg_tensor most[kMaxOperands] = {};
    for (int i = 0; i < num_in; ++i)
      most[settings_->operands[i]] = tensor_of(*settings_, i, in[i].max, nullptr);
    bytes = launch::scratch_bound(*settings_, most);
  });
  return bytes;
}

// `output` counts outputs only, unlike positions in Settings.
int32_t Plugin::aliased_input(int32_t output) noexcept {
  if (output < 0 || output >= settings_->num_outputs() || !settings_->aliased) return -1;
  const int32_t alias = settings_->operand(settings_->num_inputs + output).alias;
  return alias < 0 ? -1 : settings_->position(alias);
}

int32_t Plugin::on_shape_change(const trt::TensorDesc*, int32_t num_in, const trt::TensorDesc*,
                                int32_t num_out) noexcept {
  return guarded([&] { check_count(*settings_, num_in, num_out); });
}

int32_t Plugin::enqueue(const trt::TensorDesc* in_desc, const trt::TensorDesc* out_desc,
                        const void* const* in, void* const* out, void* workspace,
                        trt::Stream* stream) noexcept {
  // A builder times layers on made-up inputs, whose lengths and page ids may be invalid.
  if (phase_ == trt::Phase::kBuild) return 0;
  return guarded([&] {
    const Settings& settings = *settings_;
    kvg_tensor operands[kMaxOperands] = {};
    for (int i = 0; i < static_cast<int>(settings.operands.size()); ++i) {
      const int output = i - settings.num_inputs;
      operands[settings.operands[i]] =
          output < 0 ? tensor_of(settings, i, in_desc[i].dims, const_cast<void*>(in[i]))
                     : tensor_of(settings, i, out_desc[output].dims, out[output]);
    }
    // The host cannot read max_lengths, which is in device memory. kTypical, because the workspace
    // was sized before a device was known.
    const kvg_sizes sizes = launch::sizes_of(settings, operands, nullptr);
    const kvg_plan plan =
        device_.plan(settings, operands, sizes, launch::Multiprocessors::kTypical);
    if (const size_t bytes = launch::scratch_bytes(plan); bytes && !workspace)
      refuse(KVG_REFUSED,
             "%s: workspace: expected %zu bytes, got none: the engine was built for a "
             "profile that the kernels refuse; build it for a smaller one",
             settings.op->name, bytes);
    device_.run(settings, operands, plan, workspace, stream);
  });
}

}  // namespace kvg::tensorrt
