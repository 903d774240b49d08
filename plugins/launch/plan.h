// Which kernels a step launches, with which grids: the rules of kvgraph/kernels/launch.py, over the
// constants that it gives per architecture. tests/plugins/test_tensorrt_plan.py compares the two.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace kvg::launch {

enum Role { kStore, kPrefill, kDecode, kDecodeSplit, kMerge, kNumRoles };
constexpr const char* kRoleNames[kNumRoles] = {"store", "prefill", "decode", "decode_split", "merge"};

// The integers that a launch passes by value.
enum Value {
  kBatchSize, kLayer, kTableWidth, kTilesPerRow, kRowsBelow, kNewAbove, kNewUpto, kNumParts,
  kTokensPerRow, kNumValues
};
constexpr const char* kValueNames[kNumValues] = {
    "batch_size", "layer",     "table_width", "tiles_per_row", "rows_below",
    "new_above",  "new_upto",  "num_parts",   "tokens_per_row"};

// float32 memory that the launches of a step share.
enum Scratch { kPartialOut, kPartialState, kNumScratch };
constexpr const char* kScratchNames[kNumScratch] = {"partial_out", "partial_state"};

// Constants of the kernels of one architecture.
struct Tiling {
  int64_t heads, kv_heads, v_width, window;
  int64_t store_tokens, prefill_tokens, decode_tokens;  // new tokens of a row that a tile takes
  int64_t multiprocessors;  // of a typical device: fixed, so that the workspace is known at build
  int64_t min_part, max_parts;
};

// What the host knows of a step: upper bounds, never the values on the device.
struct Sizes {
  int64_t batch_size, total_seq_len, max_new, max_context, table_width;
};

struct Launch {
  Role role;
  int64_t grid[2];
  int64_t values[kNumValues];
};

struct Plan {
  std::vector<Launch> launches;
  int64_t scratch[kNumScratch] = {};  // elements
};

Plan plan_step(const Tiling& tiling, const Sizes& sizes, int64_t layer, bool stores, bool attends);

// Elements of the scratch memory of any step up to `most`.
struct ScratchBound {
  int64_t elements[kNumScratch];
};
ScratchBound bound_scratch(const Tiling& tiling, const Sizes& most);

}  // namespace kvg::launch
