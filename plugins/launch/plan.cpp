#include "launch/plan.h"

#include <algorithm>

namespace kvg::launch {
namespace {

int64_t ceildiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

int64_t power_of_two(int64_t n) {
  int64_t power = 1;
  while (power < n) power *= 2;
  return power;
}

Launch launch(Role role, const Sizes& sizes, int64_t layer, int64_t tiles_per_row) {
  Launch made{role, {1, 1}, {}};
  made.values[kBatchSize] = sizes.batch_size;
  made.values[kLayer] = layer;
  made.values[kTableWidth] = sizes.table_width;
  made.values[kTilesPerRow] = tiles_per_row;
  made.values[kRowsBelow] = power_of_two(sizes.batch_size);
  return made;
}

// Tiles of `block` new tokens: as many for every row, or found by search if those are fewer.
Launch tiled(Role role, const Tiling& tiling, const Sizes& sizes, int64_t layer, int64_t block) {
  const int64_t per_row = ceildiv(std::min(sizes.max_new, sizes.total_seq_len), block);
  const int64_t every = sizes.batch_size * per_row;
  const int64_t searched = sizes.total_seq_len / block + sizes.batch_size;
  const bool search = searched < every;
  Launch made = launch(role, sizes, layer, search ? 0 : per_row);
  made.grid[0] = (search ? searched : every) * tiling.kv_heads;
  return made;
}

// Parts of every row's context: enough programs for the device, of at least min_part keys. Beside
// prefill rows (`mixed`) the device is busy, but a long decode row must not come last.
int64_t parts(const Tiling& tiling, const Sizes& sizes, bool mixed) {
  int64_t keys = sizes.max_context;
  if (tiling.window) keys = std::min(keys, tiling.window + tiling.min_part);
  const int64_t most = ceildiv(keys, tiling.min_part);
  const int64_t programs = sizes.batch_size * tiling.kv_heads;
  const int64_t wanted = mixed ? ceildiv(most, 16) : ceildiv(4 * tiling.multiprocessors, programs);
  return std::max<int64_t>(1, std::min({most, wanted, tiling.max_parts}));
}

void plan_prefill(const Tiling& tiling, const Sizes& sizes, int64_t layer, Plan& plan) {
  Launch made = tiled(kPrefill, tiling, sizes, layer, tiling.prefill_tokens);
  made.values[kNewAbove] = tiling.decode_tokens;
  made.values[kNewUpto] = INT32_MAX;
  made.values[kNumParts] = 1;
  plan.launches.push_back(made);
}

void plan_decode(const Tiling& tiling, const Sizes& sizes, int64_t layer, int64_t num_parts,
                 Plan& plan) {
  Launch attend = launch(num_parts > 1 ? kDecodeSplit : kDecode, sizes, layer, 1);
  attend.grid[0] = sizes.batch_size * tiling.kv_heads;
  attend.grid[1] = num_parts;
  attend.values[kNewUpto] = tiling.decode_tokens;
  attend.values[kNumParts] = num_parts;
  plan.launches.push_back(attend);
  if (num_parts == 1) return;
  const int64_t tokens = std::min(sizes.max_new, tiling.decode_tokens);
  Launch merge{kMerge, {sizes.batch_size * tokens * tiling.heads, 1}, {}};
  merge.values[kTokensPerRow] = tokens;
  merge.values[kNumParts] = num_parts;
  plan.launches.push_back(merge);
  const int64_t slots = sizes.batch_size * tiling.decode_tokens * tiling.heads * num_parts;
  plan.scratch[kPartialOut] = slots * tiling.v_width;
  plan.scratch[kPartialState] = slots * 2;
}

void plan_attention(const Tiling& tiling, const Sizes& sizes, int64_t layer, Plan& plan) {
  const int64_t longest = std::min(sizes.max_new, sizes.total_seq_len);
  const bool prefills = longest > tiling.decode_tokens;
  if (prefills) plan_prefill(tiling, sizes, layer, plan);
  if (prefills && sizes.total_seq_len == sizes.batch_size * longest) return;  // all rows are long
  plan_decode(tiling, sizes, layer, parts(tiling, sizes, prefills), plan);
}

}  // namespace

Plan plan_step(const Tiling& tiling, const Sizes& sizes, int64_t layer, bool stores, bool attends) {
  Plan plan;
  if (!sizes.total_seq_len) return plan;
  if (stores) plan.launches.push_back(tiled(kStore, tiling, sizes, layer, tiling.store_tokens));
  if (attends) plan_attention(tiling, sizes, layer, plan);
  return plan;
}

ScratchBound bound_scratch(const Tiling& tiling, const Sizes& most) {
  int64_t row_parts = 0;  // rows times parts, where a context is split
  for (int64_t rows = 1; rows <= most.batch_size; ++rows)
    for (bool mixed : {false, true}) {
      Sizes sizes = most;
      sizes.batch_size = rows;
      const int64_t found = parts(tiling, sizes, mixed);
      if (found > 1) row_parts = std::max(row_parts, rows * found);
    }
  const int64_t slots = row_parts * tiling.decode_tokens * tiling.heads;
  return {{slots * tiling.v_width, slots * 2}};
}

}  // namespace kvg::launch
