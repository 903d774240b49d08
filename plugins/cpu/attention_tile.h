// One task of attention: a tile of queries of some kv heads, over a part of the keys.
#pragma once

#include <algorithm>
#include <vector>

#include "cpu/attention.h"

namespace kvg {

// New tokens [begin, end) of a row, and part `part` of the keys that they see. `partial`: index of
// the part's first partial; the parts of a tile are adjacent there. Keys are processed in segments
// of `segment`, joined in order: within a task, or, if each segment is a part, by the merge.
struct Tile {
  int64_t row, begin, end, part, parts, partial, segment;
};

constexpr int64_t kFewRows = 8;  // up to this many rows, K and V are multiplied as they are read

// Positions of the row that a query sees: [first, last).
struct Keys {
  int64_t first, last;
};

inline Keys keys_of(const Attention& job, int64_t row, int64_t position) {
  int64_t first = 0;
  if (job.window)
    first = job.chunked ? position - position % job.window
                        : std::max<int64_t>(0, position - job.window + 1);
  return {first, job.causal ? position + 1 : job.rows.length(row)};
}

// The keys of the tile's part, among those that any query of the tile sees.
inline Keys keys_of_part(const Attention& job, const Tile& tile) {
  const int64_t cached = job.rows.cached[tile.row];
  const int64_t first = keys_of(job, tile.row, cached + tile.begin).first;
  const int64_t last = keys_of(job, tile.row, cached + tile.end - 1).last;
  if (tile.parts == 1) return {first, last};
  const int64_t begin = (first / tile.segment + tile.part) * tile.segment;
  return {std::max(first, begin), std::min(last, begin + tile.segment)};
}

// Results of the tasks of split contexts, for the merge: softmax state and output per query row.
struct Partial {
  std::vector<float> floats;
  int64_t stride;  // floats of one query row of a tile part: top, sum, E outputs

  float* at(int64_t index) { return floats.data() + index * stride; }
};

// The sink of a query head, in units of log2(e); -infinity: none.
float sink_of(const Attention& job, int64_t query_head);

// Writes the output of kv heads [first_head, last_head), or the partials of a split tile.
void attend_tile(const Attention& job, Partial& partial, const Tile& tile, int64_t first_head,
                 int64_t last_head);

}  // namespace kvg
