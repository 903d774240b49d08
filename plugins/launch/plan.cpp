#include "launch/plan.h"

#include <algorithm>
#include <initializer_list>

#include "common/base.h"

namespace kvg::launch {
namespace {

constexpr int64_t kMostRows = int64_t{1} << 30;  // the power of two above fits a kernel's int32
constexpr int64_t kMostMultiprocessors = 1 << 16;
// Programs of a grid, float32 elements of scratch memory and tokens of a context that no step has.
constexpr int64_t kMost = int64_t{1} << 48;

int64_t power_of_two(int64_t n) {
  int64_t power = 1;
  while (power < n) power *= 2;
  return power;
}

struct Number {
  const char* name;
  int64_t value;
};

void require_range(const kvg_plan& plan, int64_t least, int64_t most,
                   std::initializer_list<Number> numbers) {
  for (const Number& number : numbers)
    if (number.value < least || number.value > most)
      refuse(KVG_REFUSED, "%s: %s: expected %s %lld, got %lld", plan.op, number.name,
             number.value < least ? "at least" : "at most",
             static_cast<long long>(number.value < least ? least : most),
             static_cast<long long>(number.value));
}

// The product of numbers that are not negative; refuses one above kMost.
int64_t product(const kvg_plan& plan, const char* name, std::initializer_list<int64_t> factors) {
  int64_t made = 1;
  for (int64_t factor : factors)
    if (__builtin_mul_overflow(made, factor, &made) || made > kMost)
      refuse(KVG_REFUSED, "%s: %s: expected at most %lld, got more", plan.op, name,
             static_cast<long long>(kMost));
  return made;
}

// `attends`: the plan has attention, or bounds its memory.
void check_constants(const kvg_plan& plan, bool attends) {
  const kvg_constants& c = plan.constants;
  require_range(plan, 0, 1,
                {{"chunked", c.chunked}, {"causal", c.causal}, {"rope_style", c.rope_style},
                 {"norms", c.norms}});
  require_range(plan, 0, INT32_MAX,
                {{"window", c.window},
                 {"num_layers", c.num_layers},
                 {"page_size", c.page_size},
                 {"head_dim", c.head_dim},
                 {"v_head_dim", c.v_head_dim},
                 {"num_heads", c.num_heads},
                 {"scales_per_head", c.scales_per_head},
                 {"rotary_dim", c.rotary_dim}});
  require_range(plan, 0, c.num_layers ? c.num_layers - 1 : INT32_MAX, {{"layer", plan.layer}});
  if (!attends) return;
  require_range(plan, 1, INT32_MAX, {{"num_heads", c.num_heads}, {"v_head_dim", c.v_head_dim}});
  if (c.num_heads % c.num_kv_heads)
    refuse(KVG_REFUSED, "%s: num_heads: expected a multiple of the %d kv heads, got %d", plan.op,
           c.num_kv_heads, c.num_heads);
}

// Refuses numbers below 1 that the rules divide by.
void check_tiling(const kvg_plan& plan) {
  const kvg_tiling& tiling = plan.tiling;
  require_range(plan, 1, INT32_MAX,
                {{"num_kv_heads", plan.constants.num_kv_heads},
                 {"store_tokens", tiling.store_tokens},
                 {"prefill_tokens", tiling.prefill_tokens},
                 {"decode_tokens", tiling.decode_tokens},
                 {"min_part", tiling.min_part},
                 {"max_parts", tiling.max_parts}});
  require_range(plan, 1, kMostMultiprocessors, {{"multiprocessors", tiling.multiprocessors}});
}

void check_sizes(const kvg_plan& plan) {
  const kvg_sizes& sizes = plan.sizes;
  require_range(plan, 1, kMostRows, {{"batch_size", sizes.batch_size}});
  require_range(plan, 0, INT32_MAX,
                {{"total_seq_len", sizes.total_seq_len},
                 {"max_new", sizes.max_new},
                 {"table_width", sizes.table_width},
                 {"max_positions", sizes.max_positions}});
  if (sizes.max_new < 1 || sizes.max_context < 1)
    refuse(KVG_REFUSED, "%s: max_lengths: expected at least 1 new token and a context of 1, got %lld "
           "and %lld", plan.op, static_cast<long long>(sizes.max_new),
           static_cast<long long>(sizes.max_context));
  require_range(plan, 1, kMost, {{"max_context", sizes.max_context}});
  if (sizes.max_positions && sizes.max_context > sizes.max_positions)
    refuse(KVG_REFUSED, "%s: max_lengths: expected contexts of at most the %lld positions of cos_sin, "
           "got %lld", plan.op, static_cast<long long>(sizes.max_positions),
           static_cast<long long>(sizes.max_context));
}

kvg_planned& add(kvg_plan& plan, int64_t role, int64_t programs) {
  kvg_planned& made = plan.launches[plan.num_launches++];
  made = {role, {programs, 1}, {}};
  return made;
}

kvg_planned& add_rows(kvg_plan& plan, int64_t role, int64_t programs, int64_t tiles_per_row) {
  kvg_planned& made = add(plan, role, programs);
  made.values[KVG_VALUE_BATCH_SIZE] = plan.sizes.batch_size;
  made.values[KVG_VALUE_LAYER] = plan.layer;
  made.values[KVG_VALUE_TABLE_WIDTH] = plan.sizes.table_width;
  made.values[KVG_VALUE_TILES_PER_ROW] = tiles_per_row;
  made.values[KVG_VALUE_ROWS_BELOW] = power_of_two(plan.sizes.batch_size);
  return made;
}

// Adds a launch of tiles of `block` new tokens: equally many for every row, or, if that takes fewer
// tiles, only the needed ones, which find their row by search.
kvg_planned& add_tiles(kvg_plan& plan, int64_t role, int64_t block) {
  const kvg_sizes& sizes = plan.sizes;
  const int64_t per_row = ceildiv(std::min(sizes.max_new, sizes.total_seq_len), block);
  const int64_t every = sizes.batch_size * per_row;
  const int64_t searched = sizes.total_seq_len / block + sizes.batch_size;
  const bool search = searched < every;
  const int64_t tiles = search ? searched : every;
  return add_rows(plan, role, product(plan, "grid", {tiles, plan.constants.num_kv_heads}),
                  search ? 0 : per_row);
}

// Number of parts of every row's context: enough programs for the device, of at least min_part
// keys. With prefill rows (`mixed`) the device is busy, but a long decode row must not finish last.
int64_t parts(const kvg_plan& plan, int64_t batch_size, bool mixed) {
  const kvg_tiling& tiling = plan.tiling;
  int64_t keys = plan.sizes.max_context;
  const int64_t window = plan.constants.window;
  if (window) keys = std::min(keys, window + tiling.min_part);
  const int64_t most = ceildiv(keys, tiling.min_part);
  const int64_t programs = batch_size * plan.constants.num_kv_heads;
  const int64_t wanted =
      mixed ? ceildiv(most, 16) : ceildiv(int64_t{4} * tiling.multiprocessors, programs);
  return std::max<int64_t>(1, std::min<int64_t>({most, wanted, tiling.max_parts}));
}

void add_prefill(kvg_plan& plan) {
  kvg_planned& made = add_tiles(plan, KVG_ROLE_PREFILL, plan.tiling.prefill_tokens);
  made.values[KVG_VALUE_NEW_ABOVE] = plan.tiling.decode_tokens;
  made.values[KVG_VALUE_NEW_UPTO] = INT32_MAX;
  made.values[KVG_VALUE_NUM_PARTS] = 1;
}

void set_scratch(kvg_plan& plan, int64_t row_parts) {
  const kvg_constants& c = plan.constants;
  const int64_t slots =
      product(plan, "scratch", {row_parts, plan.tiling.decode_tokens, c.num_heads});
  plan.scratch[KVG_SCRATCH_PARTIAL_OUT] = product(plan, "scratch", {slots, c.v_head_dim});
  plan.scratch[KVG_SCRATCH_PARTIAL_STATE] = slots * 2;
}

void add_decode(kvg_plan& plan, int64_t num_parts) {
  const int64_t rows = plan.sizes.batch_size;
  kvg_planned& attend = add_rows(plan, num_parts > 1 ? KVG_ROLE_DECODE_SPLIT : KVG_ROLE_DECODE,
                                 product(plan, "grid", {rows, plan.constants.num_kv_heads}), 1);
  attend.grid[1] = num_parts;
  attend.values[KVG_VALUE_NEW_UPTO] = plan.tiling.decode_tokens;
  attend.values[KVG_VALUE_NUM_PARTS] = num_parts;
  if (num_parts == 1) return;
  const int64_t tokens = std::min<int64_t>(plan.sizes.max_new, plan.tiling.decode_tokens);
  kvg_planned& merge = add(plan, KVG_ROLE_MERGE,
                          product(plan, "grid", {rows, tokens, plan.constants.num_heads}));
  merge.values[KVG_VALUE_TOKENS_PER_ROW] = tokens;
  merge.values[KVG_VALUE_NUM_PARTS] = num_parts;
  set_scratch(plan, rows * num_parts);
}

// Adds a launch for rows that fit into a decode tile and one for longer rows, if such rows may
// exist.
void add_attention(kvg_plan& plan) {
  const kvg_sizes& sizes = plan.sizes;
  const int64_t longest = std::min(sizes.max_new, sizes.total_seq_len);
  const bool prefills = longest > plan.tiling.decode_tokens;
  if (prefills) add_prefill(plan);
  if (prefills && sizes.total_seq_len == sizes.batch_size * longest) return;  // all rows are long
  add_decode(plan, parts(plan, sizes.batch_size, prefills));
}

}  // namespace

void plan_step(kvg_plan& plan) {
  plan.num_launches = 0;
  std::fill_n(plan.scratch, KVG_SCRATCH_COUNT, 0);
  if (plan.sizes.total_seq_len == 0) return;
  check_tiling(plan);
  check_constants(plan, plan.attends);
  check_sizes(plan);
  if (plan.stores) add_tiles(plan, KVG_ROLE_STORE, plan.tiling.store_tokens);
  if (plan.attends) add_attention(plan);
}

void bound_scratch(kvg_plan& plan) {
  check_tiling(plan);
  check_constants(plan, true);
  check_sizes(plan);
  const int64_t batch_size = plan.sizes.batch_size;
  int64_t row_parts = 0;  // most rows times parts of split contexts
  const auto reckon = [&](int64_t rows, bool mixed) {
    const int64_t found = parts(plan, rows, mixed);
    if (found > 1) row_parts = std::max(row_parts, rows * found);
    return found > 1;
  };
  reckon(batch_size, true);  // a mixed step has the same parts for any number of rows
  for (int64_t rows = 1; rows <= batch_size && reckon(rows, false); ++rows) {
  }
  set_scratch(plan, row_parts);
}

}  // namespace kvg::launch
