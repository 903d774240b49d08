// The common base of attention tasks: a tile of queries of some kv heads, the keys of its part, the
// softmax and the outputs. Derived classes multiply by K and V.
//
// Legend: M query rows of one kv head (tile of new tokens x its query heads, token-major), D
// head_dim, E v_head_dim, J keys of a tile. Scores are in units of log2(e): weights are powers of 2.
#pragma once

#include <algorithm>
#include <vector>

#include "cpu/attention_tile.h"
#include "cpu/kernels.h"

namespace kvg {

// Whether sums of int8 products fit into 32 bits and a key has one scale; true for other pools.
inline bool fits_integers(const Pool& pool) {
  return pool.dtype != KVG_INT8 || (pool.head_dim <= 512 && pool.scales_per_head == 1);
}

struct alignas(64) Line {
  float floats[16];
};

// Number of lines that `count` floats take.
inline int64_t lines_of(int64_t count) { return (count + 15) / 16; }

// Up to kKeys keys of a row, and the addresses of their head 0: [K or V][key]. Pointers beyond the
// last key repeat it.
struct KeyTile {
  int64_t first = 0, keys = 0;
  const char* rows[2][kKeys];
  const float* scales[2][kKeys];  // for a quantised pool only
};

class AttentionTask {
 protected:
  AttentionTask(const Attention& job, Partial& partial, const Tile& tile, int64_t first_head,
                int64_t last_head);

  // Makes room for the outputs and scores, and for `lines` more, whose address is returned.
  Line* make_room(int64_t lines);

  // Calls take(head, row, q) for every query, after its steps, as float32; q[D] is 0.
  template <class Take>
  void each_query(Take&& take) const {
    const Dtype& type = dtype(job_.dtype);
    const auto width = static_cast<size_t>(D_);
    const bool is_rounded = job_.steps && job_.dtype != KVG_FLOAT32;
    std::vector<char> rounded(is_rounded ? width * type.size : 0);
    std::vector<float> wide(width + 1);
    for (int64_t head = first_head_; head < last_head_; ++head)
      for (int64_t row = 0; row < rows_; ++row) {
        const int64_t token = tile_.begin + row / group_;
        const int64_t from = element(token, head * group_ + row % group_, D_);
        type.to_float(job_.q + from * static_cast<int64_t>(type.size), wide.data(), width);
        job_.steps.apply(wide.data(), position(token));
        if (is_rounded) {  // to their dtype, as keys are
          type.from_float(wide.data(), rounded.data(), width);
          type.to_float(rounded.data(), wide.data(), width);
        }
        take(head, row, wide.data());
      }
  }

  // The first tile. Tiles begin at multiples of kKeys, whatever the first key is, because weights
  // for int8 are rounded relative to the largest one of a tile.
  KeyTile first_tile() const {
    const Keys keys = keys_of_part(job_, tile_);
    KeyTile tile;
    find(keys.first - keys.first % kKeys, keys.last, tile);
    const int64_t missing = keys.first % kKeys;
    for (int kind : {0, 1}) {  // no query sees these keys, so their pages may be missing
      std::fill_n(tile.rows[kind], missing, tile.rows[kind][missing]);
      if (job_.pool.scales)
        std::fill_n(tile.scales[kind], missing, tile.scales[kind][missing]);
    }
    return tile;
  }

  // Calls body(tile, next) for every tile of this part's keys, from `first` on.
  template <class Body>
  void each_tile(const KeyTile& first, Body&& body) {
    const Keys keys = keys_of_part(job_, tile_);
    KeyTile tiles[2] = {first, {}};
    for (int at = 0; tiles[at].keys > 0; at = 1 - at) {
      const int64_t next = tiles[at].first + tiles[at].keys;
      find(next, keys.last, tiles[1 - at]);
      body(tiles[at], tiles[1 - at]);
      if (next % tile_.segment == 0 && next < keys.last) end_segment(), begin_segment();
    }
  }

  // Number of keys of a step that reads about `size` bytes of `heads` heads, at least `fewest`. A
  // tile has a whole number of steps.
  int64_t step_of(int64_t heads, int64_t size, int64_t fewest) const {
    int64_t keys = kKeys;
    while (keys > fewest && keys * heads * row_size_ > size) keys /= 2;
    return keys;
  }

  // Number of int8 keys whose exact sum is added to the output at a time. Adding rounds, so the
  // number must not depend on the heads of a task, which depend on the batch and on the threads.
  int64_t keys_of_sum() const {
    return step_of(job_.pool.kv_heads, kernels_.streams[KVG_INT8]->step_size, 8);
  }

  // Calls body(head, first key, number of keys, next rows) for every head of every `step` keys of K
  // (kind 0) or V (1). `after`: the rows that follow the tile's. Rows are read in storage order.
  template <class Body>
  void each_step(const KeyTile& tile, int kind, int64_t step, const char* const* after,
                 Body&& body) const {
    for (int64_t j = 0; j < tile.keys; j += step) {
      Ahead ahead = ahead_of(j + step < kKeys ? tile.rows[kind] + j + step : after, step);
      for (int64_t head = first_head_; head < last_head_; ++head)
        body(head, j, std::min(step, tile.keys - j), ahead);
    }
  }

  // Prefetches of all heads of `step` rows.
  Ahead ahead_of(const char* const* rows, int64_t step) const {
    const int64_t begin = first_head_ * row_size_;
    return {rows, rows + step, begin, last_head_ * row_size_, begin};
  }

  // Turns the scores of a head into weights.
  void weigh(int64_t head, const KeyTile& tile);
  // Writes the outputs, or the partials of a split tile.
  void leave();

  int64_t heads() const { return last_head_ - first_head_; }
  int64_t state_of(int64_t head) const { return (head - first_head_) * rows_; }
  float* scores_of(int64_t head) const { return scores_ + state_of(head) * kKeys; }
  float* out_of(int64_t head) const { return out_ + state_of(head) * E_; }

  const Kernels& kernels_ = kernels();
  const Attention& job_;
  const int64_t first_head_, last_head_, group_, rows_, D_, E_;
  const int64_t size_;      // bytes of an element of the pool
  const int64_t row_size_;  // bytes of K or V of one head of one key
  const int64_t block_;     // elements of a key that share a scale

 private:
  int64_t position(int64_t token) const { return job_.rows.cached[tile_.row] + token; }
  // Elements before query head `head` of new token `token` of the row, in rows `width` wide.
  int64_t element(int64_t token, int64_t head, int64_t width) const {
    return ((job_.rows.begin(tile_.row) + token) * job_.heads + head) * width;
  }
  void begin_segment();
  void end_segment();
  void find(int64_t first, int64_t end, KeyTile& tile) const;
  void finish(int64_t head);
  void save_partial(int64_t head);

  Partial& partial_;
  const Tile& tile_;
  const float scale_, softcap_;  // factor and softcap of Kernels::weigh
  float *out_, *scores_;         // [heads, M, E], [heads, M, J]
  Softmax* softmax_;             // [heads, M]
  float* joined_out_;            // joined outputs of earlier segments
  Softmax* joined_;
  bool has_joined_ = false;
};

}  // namespace kvg
