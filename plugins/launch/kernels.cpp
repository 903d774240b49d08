#include "launch/kernels.h"

#include <algorithm>
#include <cstring>

#include "common/base.h"

namespace kvg::launch {
namespace {

constexpr char kText[] = "kvgraph-kernels 1";  // the first bytes of version 1

template <size_t N>
bool ends(const char (&text)[N]) {
  return std::memchr(text, 0, N);
}

[[noreturn]] void refuse_version(const char* what, uint32_t expected, uint32_t found) {
  refuse(KVG_REFUSED, "field kernels: expected %s %u of this kvgraph, got %u: compile the model again",
         what, expected, found);
}

kvg_kernels read_header(const std::string& record) {
  if (!record.compare(0, sizeof kText - 1, kText)) refuse_version("version", KVG_KERNELS_VERSION, 1);
  kvg_kernels header;
  if (record.size() < sizeof header)
    refuse(KVG_REFUSED, "field kernels: expected a record of at least %zu bytes, got %zu",
           sizeof header, record.size());
  std::memcpy(&header, record.data(), sizeof header);
  if (header.version != KVG_KERNELS_VERSION)
    refuse_version("version", KVG_KERNELS_VERSION, header.version);
  if (header.contract_version != KVG_ABI_VERSION)
    refuse_version("operands of ABI version", KVG_ABI_VERSION, header.contract_version);
  return header;
}

void check_size(const kvg_kernels& header, const std::string& record) {
  if (!header.num_archs)
    refuse(KVG_REFUSED, "field kernels: expected kernels of at least one arch, got none");
  if (header.arch_size != sizeof(kvg_arch_kernels))
    refuse(KVG_REFUSED, "field kernels: expected %zu bytes for an arch, got %u",
           sizeof(kvg_arch_kernels), header.arch_size);
  const size_t size = sizeof header + size_t{header.num_archs} * header.arch_size;
  const bool ended = record.size() == size + 1 && !record[size];  // a final NUL, from a parser
  if (record.size() != size && !ended)
    refuse(KVG_REFUSED, "field kernels: expected a record of %zu bytes, got %zu", size, record.size());
}

void check_dtype(const char* variable, int32_t code) {
  constexpr int32_t count = sizeof KVG_DTYPE_NAMES / sizeof *KVG_DTYPE_NAMES;
  if (code < 1 || code >= count)
    refuse(KVG_REFUSED, "field kernels: %s: expected a dtype of 1 to %d, got %d", variable, count - 1,
           code);
}

void set_dims(const kvg_op& op, bool attends, Kernels& kernels) {
  const kvg_constants& c = kernels.constants;
  const struct {
    int symbol;
    int32_t extent;
    bool required;
  } known[] = {{KVG_DIM_NUM_LAYERS, c.num_layers, true},
               {KVG_DIM_PAGE_SIZE, c.page_size, true},
               {KVG_DIM_NUM_KV_HEADS, c.num_kv_heads, true},
               {KVG_DIM_HEAD_DIM, c.head_dim, true},
               {KVG_DIM_V_HEAD_DIM, c.v_head_dim, true},
               {KVG_DIM_NUM_HEADS, c.num_heads, attends},
               {KVG_DIM_SCALES_PER_HEAD, c.scales_per_head, false},
               {KVG_DIM_ROTARY_DIM, c.rotary_dim, false}};
  for (const auto& dim : known) {
    if (dim.extent < 0 || (dim.required && !dim.extent))
      refuse(KVG_REFUSED, "field kernels: %s: expected dim %s of at least 1, got %d", op.name,
             KVG_DIM_NAMES[dim.symbol], dim.extent);
    kernels.dims[dim.symbol] = dim.extent;
  }
}

void set_attributes(Kernels& kernels) {
  const kvg_constants& c = kernels.constants;
  kernels.attributes = {{"scale", c.scale},
                        {"window", c.window},
                        {"chunked", c.chunked},
                        {"softcap", c.softcap},
                        {"causal", c.causal}};
  if (c.rotary_dim) kernels.attributes["rope_style"] = c.rope_style;
  if (!c.norms) return;
  kernels.attributes["norm_epsilon"] = c.norm_epsilon;
  kernels.attributes["norm_offset"] = c.norm_offset;
}

void check_tiling(const cuda::Arch& arch, const kvg_tiling& t) {
  if (std::min({t.store_tokens, t.prefill_tokens, t.decode_tokens, t.multiprocessors, t.min_part,
                t.max_parts}) < 1)
    refuse(KVG_REFUSED, "field kernels: %s: expected a tiling of numbers of at least 1, got %d %d %d "
           "%d %d %d", arch.name.c_str(), t.store_tokens, t.prefill_tokens, t.decode_tokens,
           t.multiprocessors, t.min_part, t.max_parts);
}

int operand_index(const kvg_op& op, const char* name) {
  for (int i = 0; i < op.num_inputs + op.num_outputs; ++i)
    if (!std::strcmp(name, op.operands[i].name)) return i;
  return -1;
}

int count_of(uint8_t kind) {
  const kvg_op& all = KVG_OP_UPDATE_AND_ATTEND;
  switch (kind) {
    case KVG_PARAMETER_OPERAND: return all.num_inputs + all.num_outputs;
    case KVG_PARAMETER_SCRATCH: return KVG_SCRATCH_COUNT;
    case KVG_PARAMETER_VALUE: return KVG_VALUE_COUNT;
  }
  return 0;
}

// Renumbers a parameter's operand for `op`; returns false if `op` has no operand of that name.
bool read_parameter(const kvg_op& op, const kvg_kernel& kernel, kvg_parameter& parameter) {
  if (parameter.index >= count_of(parameter.kind))
    refuse(KVG_REFUSED, "field kernels: %s: expected parameters of kind 1 to 3 that a plan has, got "
           "kind %d, index %d", kernel.function, parameter.kind, parameter.index);
  if (parameter.kind != KVG_PARAMETER_VALUE && !parameter.alignment)
    refuse(KVG_REFUSED, "field kernels: %s: expected an alignment of at least 1 of every pointer, "
           "got 0", kernel.function);
  if (parameter.kind != KVG_PARAMETER_OPERAND) return true;
  const int operand = operand_index(op, KVG_UPDATE_AND_ATTEND_OPERANDS[parameter.index].name);
  parameter.index = static_cast<uint8_t>(operand);
  return operand >= 0;
}

void read_kernel(const kvg_op& op, kvg_kernel& kernel) {
  if (!ends(kernel.function) || kernel.num_parameters > KVG_MAX_PARAMETERS)
    refuse(KVG_REFUSED, "field kernels: %.64s: expected a name that ends and at most %d parameters, "
           "got %u", kernel.function, KVG_MAX_PARAMETERS, kernel.num_parameters);
  bool foreign = false;
  for (uint32_t i = 0; i < kernel.num_parameters; ++i)
    foreign |= !read_parameter(op, kernel, kernel.parameters[i]);
  if (foreign) kernel = {};
}

// A record's architecture. For 9.0 and newer, Triton makes code for that compute capability only.
cuda::Arch arch_of(const char* text) {
  cuda::Arch arch = cuda::parse_arch(text);
  if (arch.number() < 90) return arch;
  arch.exact = true;
  arch.name = "sm_" + std::to_string(arch.number()) + "a";
  return arch;
}

ArchKernels read_arch(const kvg_op& op, const char* at, bool stores, bool attends) {
  kvg_arch_kernels record;
  std::memcpy(&record, at, sizeof record);
  ArchKernels made{arch_of(ends(record.arch) ? record.arch : ""), record.tiling, {}};
  check_tiling(made.arch, made.tiling);
  for (int role = 0; role < KVG_ROLE_COUNT; ++role) {
    read_kernel(op, record.kernels[role]);
    if ((role == KVG_ROLE_STORE ? stores : attends) && !given(record.kernels[role]))
      refuse(KVG_REFUSED, "field kernels: %s: expected a %s kernel for %s, got none", record.arch,
             KVG_ROLE_NAMES[role], op.name);
    made.kernels[role] = record.kernels[role];
  }
  return made;
}

}  // namespace

int32_t Kernels::dtype_of(const kvg_operand& operand) const {
  if (operand.type_variable) return operand.type_variable == 1 ? constants.dtype : constants.pool_dtype;
  int32_t code = 1;
  while (!(operand.dtypes >> code & 1u)) ++code;
  return code;
}

int64_t Kernels::extent_of(const kvg_dim& dim) const {
  if (dim.symbol < 0) return dim.value;
  return dims[dim.symbol] ? dims[dim.symbol] + dim.value : 0;
}

const ArchKernels& Kernels::on(int major, int minor) const {
  const ArchKernels* best = nullptr;
  std::string known;
  for (const ArchKernels& candidate : archs) {
    known += (known.empty() ? "" : ", ") + candidate.arch.name;
    if (candidate.arch.runs_on(major, minor) &&
        (!best || best->arch.number() < candidate.arch.number()))
      best = &candidate;
  }
  if (!best)
    refuse(KVG_DEVICE, "device: expected one that runs the graph's kernels (%s), got compute "
           "capability %d.%d: compile with --target cuda:sm_%d%d", known.c_str(), major, minor,
           major, minor);
  return *best;
}

Kernels read_kernels(const kvg_op& op, const std::string& record, bool stores) {
  const kvg_kernels header = read_header(record);
  check_size(header, record);
  const bool attends = operand_index(op, "out") >= 0;
  Kernels made;
  made.constants = header.constants;
  check_dtype("dtype", header.constants.dtype);
  check_dtype("pool_dtype", header.constants.pool_dtype);
  set_dims(op, attends, made);
  set_attributes(made);
  for (uint32_t i = 0; i < header.num_archs; ++i)
    made.archs.push_back(
        read_arch(op, record.data() + sizeof header + i * sizeof(kvg_arch_kernels), stores, attends));
  for (const ArchKernels& arch : made.archs)
    for (const kvg_kernel& kernel : arch.kernels)
      for (uint32_t i = 0; i < kernel.num_parameters; ++i)
        if (kernel.parameters[i].kind == KVG_PARAMETER_OPERAND)
          made.taken |= 1u << kernel.parameters[i].index;
  return made;
}

}  // namespace kvg::launch
