// Decision: K and V are read in the order in which they are stored, a step of a few keys of all
// heads at a time. While a step is multiplied, the lines of the next one are prefetched evenly: a
// core can wait for few lines at once, drops the prefetches of a burst beyond them, and its own
// prefetchers do not follow reads that products interrupt. Measured on Zen 5 (8 rows of 4,096 keys,
// 8 kv heads of 128, bfloat16, one thread): 23 GB/s of the 36 that the core reads; 19 with bursts
// of prefetches, 8 without any.
#include "cpu/attention_stream.h"

#include "cpu/attention_task.h"

namespace kvg {
namespace {

const StreamKernels* kernels_of(const Attention& job, const Tile& tile) {
  const int64_t rows = (tile.end - tile.begin) * (job.heads / job.pool.kv_heads);
  return rows <= kFewRows && has_streams(job.pool) ? kernels().streams[job.pool.dtype] : nullptr;
}

class StreamTask : AttentionTask {
 public:
  StreamTask(const StreamKernels& streams, const Attention& job, Partial& partial,
             const Tile& tile, int64_t first_head, int64_t last_head)
      : AttentionTask(job, partial, tile, first_head, last_head),
        streams_(streams),
        step_(job.pool.scales ? keys_of_sum() : step_of(heads(), streams_.step_size, 8)) {}

  void run() {
    const int64_t queries = heads() * streams_.packed_size(rows_, D_) / kLine;
    Line* room = make_room(queries + lines_of(2 * heads() * kKeys));
    queries_ = reinterpret_cast<char*>(room);
    factors_ = room[queries].floats;
    const KeyTile first = first_tile();
    load_queries(first);
    each_tile(first, [this](const KeyTile& tile, const KeyTile& next) { attend(tile, next); });
    leave();
  }

 private:
  void load_queries(const KeyTile& first) {
    Ahead ahead = ahead_of(first.rows[0], step_);
    const int64_t lines = first.keys ? step_ * row_size_ / kLine / rows_ + 1 : 0;
    each_query([&](int64_t head, int64_t row, const float* q) {
      ahead.ask(lines);
      streams_.pack_query(q, queries_of(head), row, D_);
    });
  }

  void attend(const KeyTile& tile, const KeyTile& next) {
    load_factors(tile, next);
    each_step(tile, 0, step_, tile.rows[1],
              [&](int64_t head, int64_t j, int64_t keys, Ahead& ahead) {
                const Stream k = stream_of(tile, 0, head, j, ahead);
                streams_.dot(queries_of(head), k, scores_of(head) + j, rows_, D_, keys);
              });
    for (int64_t head = first_head_; head < last_head_; ++head) {
      weigh(head, tile);
      streams_.pack_weights(scores_of(head), factors_of(1, head), rows_);
    }
    const KeyTile& after = next.keys ? next : tile;
    each_step(tile, 1, step_, after.rows[0],
              [&](int64_t head, int64_t j, int64_t keys, Ahead& ahead) {
                const Stream v = stream_of(tile, 1, head, j, ahead);
                streams_.add(scores_of(head), v, out_of(head), rows_, E_, j, keys);
              });
  }

  Stream stream_of(const KeyTile& tile, int kind, int64_t head, int64_t first, Ahead& ahead) const {
    return {tile.rows[kind] + first, factors_of(kind, head) + first, head * row_size_, &ahead};
  }

  char* queries_of(int64_t head) const {
    return queries_ + (head - first_head_) * streams_.packed_size(rows_, D_);
  }

  // The scales of K or V of a head, [J].
  float* factors_of(int kind, int64_t head) const {
    return factors_ + (2 * (head - first_head_) + kind) * kKeys;
  }

  void load_factors(const KeyTile& tile, const KeyTile& next) {
    if (!job_.pool.scales) return;
    const int64_t per_line = std::max<int64_t>(1, kLine / 4 / job_.pool.kv_heads);  // keys
    for (int kind : {0, 1}) {
      for (int64_t j = 0; j < next.keys; j += per_line)
        for (int64_t head = first_head_; head < last_head_; head += kLine / 4)
          __builtin_prefetch(next.scales[kind][j] + head);
      for (int64_t head = first_head_; head < last_head_; ++head) {
        float* to = factors_of(kind, head);
        for (int64_t j = 0; j < kKeys; ++j) to[j] = tile.scales[kind][j][head];
      }
    }
  }

  const StreamKernels& streams_;
  const int64_t step_;  // keys of all heads that are multiplied at a time
  char* queries_;   // packed queries of all heads
  float* factors_;  // [heads, 2, J]
};

}  // namespace

bool has_streams(const Pool& pool) {
  return fits_integers(pool) && kernels().streams[pool.dtype];
}

bool attend_stream(const Attention& job, Partial& partial, const Tile& tile, int64_t first_head,
                   int64_t last_head) {
  const StreamKernels* streams = kernels_of(job, tile);
  if (streams) StreamTask(*streams, job, partial, tile, first_head, last_head).run();
  return streams;
}

}  // namespace kvg
