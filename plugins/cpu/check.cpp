#include "cpu/check.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "cpu/kernels.h"

namespace kvg {

void require_data(const char* op, const char* field, const void* pointer, size_t count,
                  size_t alignment) {
  if (!count) return;
  if (!pointer) refuse("%s: %s: expected data, got a null pointer", op, field);
  if (reinterpret_cast<uintptr_t>(pointer) % alignment)
    refuse("%s: %s: expected an address that is a multiple of %zu, got %p", op, field, alignment,
           pointer);
}

namespace {

// Returns an attribute as float32; `fits` says whether that value is allowed.
template <class Fits>
float narrowed(const Operands& in, int attribute, const char* expected, Fits&& fits) {
  const double value = in.real(attribute);
  const auto found = static_cast<float>(value);
  if (!fits(found) || (found == 0 && value != 0))
    refuse("%s: %s: expected %s, got %g", in.op.name, in.op.attributes[attribute].name,
           fits(found) ? "0, or a number that is not 0 in float32" : expected, value);
  return found;
}

}  // namespace

float Operands::finite(int attribute) const {
  return narrowed(*this, attribute, "a finite number in float32",
                  [](float x) { return std::isfinite(x); });
}

float Operands::at_least_0(int attribute) const {
  return narrowed(*this, attribute, "at least 0, and finite in float32",
                  [](float x) { return x >= 0 && std::isfinite(x); });
}

namespace {

using ll = long long;

// Up to these, sizes and strides made of extents fit 64 bits.
constexpr int64_t kMostExtent = int64_t{1} << 40, kMostElements = int64_t{1} << 48;

std::string allowed_names(uint32_t mask) {
  std::string names;
  for (int32_t code = 1; code < 32; ++code)
    if (mask >> code & 1u) names += (names.empty() ? "" : " or ") + std::string(kvg_dtype_name(code));
  return names;
}

std::string dim_name(kvg_dim dim) {
  if (dim.symbol < 0) return std::to_string(dim.value);
  std::string name = KVG_DIM_NAMES[dim.symbol];
  return dim.value ? name + " + " + std::to_string(dim.value) : name;
}

void check_frame(const kvg_op& op, const kvg_call* call) {
  if (!call) refuse("%s: expected a call, got a null pointer", op.name);
  if (call->abi_version != KVG_ABI_VERSION)
    refuse("%s: expected ABI version %d of this library, got %u from its caller", op.name,
           KVG_ABI_VERSION, call->abi_version);
  if (call->struct_size < sizeof(kvg_call))
    refuse("%s: expected a kvg_call of at least %zu bytes, got %u", op.name, sizeof(kvg_call),
           call->struct_size);
  const uint32_t operands = static_cast<uint32_t>(op.num_inputs + op.num_outputs);
  if (call->num_operands != operands)
    refuse("%s: expected %u operands, got %u", op.name, operands, call->num_operands);
  require_data(op.name, "operands", call->operands, operands);
  const uint32_t attributes = static_cast<uint32_t>(op.num_attributes);
  if (call->num_attributes != attributes)
    refuse("%s: expected %u attributes, got %u", op.name, attributes, call->num_attributes);
  require_data(op.name, "attributes", call->attributes, attributes);
}

// A walk over an op's operands, with the operand that first bound each dim and type variable.
struct Walk {
  const kvg_op& op;
  const kvg_call& call;
  int dim_owner[KVG_NUM_DIM_SYMBOLS];
  int64_t extents[KVG_NUM_DIM_SYMBOLS];
  int type_owner[4] = {-1, -1, -1, -1};

  Walk(const kvg_op& op, const kvg_call& call) : op(op), call(call) {
    std::fill_n(dim_owner, KVG_NUM_DIM_SYMBOLS, -1);
    std::fill_n(extents, KVG_NUM_DIM_SYMBOLS, 0);
  }

  void operand(int index) {
    const kvg_operand& spec = op.operands[index];
    const kvg_tensor& given = call.operands[index];
    if (given.dtype == 0) {
      if (!spec.optional && spec.alias < 0)
        refuse("%s: %s: expected a tensor, got none", op.name, spec.name);
      return;
    }
    dtype(index);
    if (given.rank != spec.rank)
      refuse("%s: %s: expected rank %d, got %d", op.name, spec.name, spec.rank, given.rank);
    bool empty = false;
    int64_t elements = 1;  // of what has no extent 0
    for (int axis = 0; axis < spec.rank; ++axis) {
      const int64_t before = elements, extent = given.shape[axis];
      dim(index, axis);
      empty |= extent == 0;
      const bool overflows = extent && __builtin_mul_overflow(before, extent, &elements);
      if (overflows || extent > kMostExtent || elements > kMostElements)
        refuse("%s: %s: dim %s: expected at most %lld, got %lld", op.name, spec.name,
               dim_name(spec.dims[axis]).c_str(), ll{std::min(kMostExtent, kMostElements / before)},
               ll{extent});
    }
    if (spec.alias >= 0) return alias(index);
    require_data(op.name, spec.name, given.data, empty ? 0 : 1,
                 static_cast<size_t>(KVG_DTYPE_BYTES[given.dtype]));
  }

  void dtype(int index) {
    const kvg_operand& spec = op.operands[index];
    const int32_t given = call.operands[index].dtype;
    if (given < 0 || given > 31 || !(spec.dtypes >> given & 1u))
      refuse("%s: %s: expected dtype %s, got %s", op.name, spec.name,
             allowed_names(spec.dtypes).c_str(), kvg_dtype_name(given));
    if (!spec.type_variable) return;
    int& owner = type_owner[spec.type_variable];
    if (owner < 0) owner = index;
    if (call.operands[owner].dtype != given)
      refuse("%s: %s: expected dtype %s of %s, got %s", op.name, spec.name,
             kvg_dtype_name(call.operands[owner].dtype), op.operands[owner].name, kvg_dtype_name(given));
  }

  void dim(int index, int axis) {
    const kvg_operand& spec = op.operands[index];
    const kvg_dim& expected = spec.dims[axis];
    const int64_t given = call.operands[index].shape[axis];
    if (expected.symbol < 0) {
      if (given != expected.value)
        refuse("%s: %s: dim %d: expected %d, got %lld", op.name, spec.name, axis, expected.value,
               ll{given});
      return;
    }
    if (given < expected.value)
      refuse("%s: %s: dim %s: expected at least %d, got %lld", op.name, spec.name, dim_name(expected).c_str(),
             expected.value, ll{given});
    int& owner = dim_owner[expected.symbol];
    int64_t& extent = extents[expected.symbol];
    if (owner < 0) owner = index, extent = given - expected.value;
    if (extent + expected.value != given)
      refuse("%s: %s: dim %s: expected %lld as %s has it, got %lld", op.name, spec.name,
             dim_name(expected).c_str(), ll{extent + expected.value}, op.operands[owner].name, ll{given});
  }

  void alias(int index) {
    const kvg_operand& spec = op.operands[index];
    const kvg_operand& source = op.operands[spec.alias];
    const kvg_tensor& input = call.operands[spec.alias];
    if (input.dtype == 0)
      refuse("%s: %s: expected none, as %s is left out", op.name, spec.name, source.name);
    check_alias(op, index, call.operands);
  }
};

}  // namespace

Operands check(const kvg_op& op, const kvg_call* call) {
  check_frame(op, call);
  Walk walk(op, *call);
  for (int i = 0; i < op.num_inputs + op.num_outputs; ++i) walk.operand(i);
  Operands in{op, *call, {}};
  std::copy_n(walk.extents, KVG_NUM_DIM_SYMBOLS, in.dims);
  return in;
}

Rows check_rows(const Operands& in, int first_index, int64_t reach) {
  const char* op = in.op.name;
  const Rows rows{in.data<const int32_t>(first_index), in.data<const int32_t>(first_index + 1),
                  in.data<const int32_t>(first_index + 2), in.dims[KVG_DIM_BATCH_SIZE],
                  in.dims[KVG_DIM_MAX_NUM_PAGES], in.dims[KVG_DIM_PAGE_SIZE]};
  const int64_t slots = in.dims[KVG_DIM_NUM_PAGE_SLOTS];
  const int64_t total = in.dims[KVG_DIM_TOTAL_SEQ_LEN];
  if (rows.page_size < 1) refuse("%s: kv_blocks: dim page_size: expected at least 1, got 0", op);
  if (rows.offsets[0] != 0)
    refuse("%s: input_row_offsets: expected 0 first, got %d", op, rows.offsets[0]);
  for (int64_t b = 0; b < rows.count; ++b) {
    if (rows.fresh(b) < 0)
      refuse("%s: input_row_offsets: expected none below its predecessor, got %d after %d", op,
             rows.offsets[b + 1], rows.offsets[b]);
    if (rows.cached[b] < 0)
      refuse("%s: cache_lengths: expected at least 0, got %d in row %lld", op, rows.cached[b],
             ll{b});
  }
  if (rows.offsets[rows.count] != total)
    refuse("%s: input_row_offsets: expected total_seq_len %lld last, got %d", op, ll{total},
           rows.offsets[rows.count]);
  for (int64_t b = 0; b < rows.count; ++b) {
    if (rows.fresh(b) == 0) continue;
    const int64_t pages = (rows.length(b) + rows.page_size - 1) / rows.page_size;
    if (pages > rows.width)
      refuse("%s: lookup_table: expected at least %lld pages wide for the %lld tokens of row %lld, "
             "got %lld", op, ll{pages}, ll{rows.length(b)}, ll{b}, ll{rows.width});
    const int64_t first = reach < 0 ? 0 : std::max<int64_t>(0, rows.cached[b] - reach);
    for (int64_t p = first / rows.page_size; p < pages; ++p) {
      const int32_t id = rows.table[b * rows.width + p];
      if (id < 0 || id >= slots)
        refuse("%s: lookup_table: expected page ids in [0, %lld) of kv_blocks, got %d at row %lld, "
               "page %lld", op, ll{slots}, id, ll{b}, ll{p});
    }
  }
  return rows;
}

Pool check_pool(const Operands& in, int kv_blocks, int kv_scales, int64_t layer,
                int64_t v_head_dim) {
  const char* op = in.op.name;
  const int64_t kinds = in.dims[KVG_DIM_KV_DIM], layers = in.dims[KVG_DIM_NUM_LAYERS];
  const int64_t page_size = in.dims[KVG_DIM_PAGE_SIZE], heads = in.dims[KVG_DIM_NUM_KV_HEADS];
  const int64_t width = in.dims[KVG_DIM_HEAD_DIM];
  const int32_t stored = in.dtype(kv_blocks);
  if (kinds != 2)
    refuse("%s: kv_blocks: dim kv_dim: expected 2 (K, then V), got %lld", op, ll{kinds});
  if (layer < 0 || layer >= layers)
    refuse("%s: layer: expected one of the %lld layers of kv_blocks, got %lld", op, ll{layers},
           ll{layer});
  if (v_head_dim > width)
    refuse("%s: v_head_dim: expected at most head_dim %lld, got %lld", op, ll{width},
           ll{v_head_dim});
  const bool quantized = quantized_max(stored) > 0;
  if (quantized != in.has(kv_scales))
    refuse("%s: kv_scales: expected %s with a pool of dtype %s, got %s", op,
           quantized ? "scales" : "none", kvg_dtype_name(stored), quantized ? "none" : "scales");
  const int64_t groups = in.dims[KVG_DIM_SCALES_PER_HEAD];
  if (quantized && (groups < 1 || groups > width || width % groups || v_head_dim % (width / groups)))
    refuse("%s: kv_scales: dim scales_per_head: expected groups that divide head_dim %lld and "
           "v_head_dim %lld, got %lld", op, ll{width}, ll{v_head_dim}, ll{groups});
  const int64_t token = heads * width, kind = layers * page_size * token;
  return {in.data<char>(kv_blocks), in.data<float>(kv_scales), stored, heads, width, groups,
          token,                    kind,                      kinds * kind,
          layer * page_size * token};
}

}  // namespace kvg
