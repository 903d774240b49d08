#include "launch/plan.h"

#include <algorithm>
#include <initializer_list>

#include "cuda/refuse.h"

namespace kvg::launch {
namespace {

using cuda::refuse;

int64_t ceildiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

int64_t power_of_two(int64_t n) {
  int64_t power = 1;
  while (power < n) power *= 2;
  return power;
}

struct Number {
  const char* name;
  int64_t value;
};

void require_positive(const kvg_plan& plan, std::initializer_list<Number> numbers) {
  for (const Number& number : numbers)
    if (number.value < 1)
      refuse(KVG_REFUSED, "%s: %s: expected at least 1, got %lld", plan.op, number.name,
             static_cast<long long>(number.value));
}

// What the rules divide by.
void check_tiling(const kvg_plan& plan) {
  const kvg_tiling& tiling = plan.tiling;
  require_positive(plan, {{"num_kv_heads", plan.constants.num_kv_heads},
                          {"store_tokens", tiling.store_tokens},
                          {"prefill_tokens", tiling.prefill_tokens},
                          {"decode_tokens", tiling.decode_tokens},
                          {"multiprocessors", tiling.multiprocessors},
                          {"min_part", tiling.min_part},
                          {"max_parts", tiling.max_parts}});
}

void check_sizes(const kvg_plan& plan) {
  const kvg_sizes& sizes = plan.sizes;
  require_positive(plan, {{"batch_size", sizes.batch_size}});
  if (sizes.max_new < 1 || sizes.max_context < 1)
    refuse(KVG_REFUSED, "%s: max_lengths: expected at least 1 new token and a context of 1, got %lld "
           "and %lld", plan.op, static_cast<long long>(sizes.max_new),
           static_cast<long long>(sizes.max_context));
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

// Tiles of `block` new tokens: as many for every row, or found by search if those are fewer.
kvg_planned& add_tiles(kvg_plan& plan, int64_t role, int64_t block) {
  const kvg_sizes& sizes = plan.sizes;
  const int64_t per_row = ceildiv(std::min(sizes.max_new, sizes.total_seq_len), block);
  const int64_t every = sizes.batch_size * per_row;
  const int64_t searched = sizes.total_seq_len / block + sizes.batch_size;
  const bool search = searched < every;
  const int64_t tiles = search ? searched : every;
  return add_rows(plan, role, tiles * plan.constants.num_kv_heads, search ? 0 : per_row);
}

// Parts of every row's context: enough programs for the device, of at least min_part keys. With
// prefill rows (`mixed`) the device is busy, but a long decode row must not come last.
int64_t parts(const kvg_plan& plan, int64_t batch_size, bool mixed) {
  const kvg_tiling& tiling = plan.tiling;
  int64_t keys = plan.sizes.max_context;
  if (plan.constants.window) keys = std::min<int64_t>(keys, plan.constants.window + tiling.min_part);
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
  const int64_t slots = row_parts * plan.tiling.decode_tokens * plan.constants.num_heads;
  plan.scratch[KVG_SCRATCH_PARTIAL_OUT] = slots * plan.constants.v_head_dim;
  plan.scratch[KVG_SCRATCH_PARTIAL_STATE] = slots * 2;
}

void add_decode(kvg_plan& plan, int64_t num_parts) {
  const int64_t rows = plan.sizes.batch_size;
  kvg_planned& attend = add_rows(plan, num_parts > 1 ? KVG_ROLE_DECODE_SPLIT : KVG_ROLE_DECODE,
                                 rows * plan.constants.num_kv_heads, 1);
  attend.grid[1] = num_parts;
  attend.values[KVG_VALUE_NEW_UPTO] = plan.tiling.decode_tokens;
  attend.values[KVG_VALUE_NUM_PARTS] = num_parts;
  if (num_parts == 1) return;
  const int64_t tokens = std::min<int64_t>(plan.sizes.max_new, plan.tiling.decode_tokens);
  kvg_planned& merge = add(plan, KVG_ROLE_MERGE, rows * tokens * plan.constants.num_heads);
  merge.values[KVG_VALUE_TOKENS_PER_ROW] = tokens;
  merge.values[KVG_VALUE_NUM_PARTS] = num_parts;
  set_scratch(plan, rows * num_parts);
}

// One launch for the rows that a decode tile takes, one for the longer ones, each only where such
// rows may exist.
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
  if (plan.sizes.total_seq_len < 1) return;
  check_tiling(plan);
  check_sizes(plan);
  if (plan.stores) add_tiles(plan, KVG_ROLE_STORE, plan.tiling.store_tokens);
  if (plan.attends) add_attention(plan);
}

void bound_scratch(kvg_plan& plan) {
  check_tiling(plan);
  int64_t row_parts = 0;  // rows times parts, where a context is split
  for (int64_t rows = 1; rows <= plan.sizes.batch_size; ++rows)
    for (bool mixed : {false, true}) {
      const int64_t found = parts(plan, rows, mixed);
      if (found > 1) row_parts = std::max(row_parts, rows * found);
    }
  set_scratch(plan, row_parts);
}

}  // namespace kvg::launch
