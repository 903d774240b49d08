#include "cpu/attention_tile.h"

#include <cstring>

#include "cpu/attention_stream.h"
#include "cpu/attention_task.h"

namespace kvg {
namespace {

constexpr int64_t kAhead = 32;  // lines that few rows ask for at once

// A pool of bfloat16 or fewer bits has lost what bfloat16 queries and weights lose, and its products
// are in bfloat16 where the processor has them and many rows share a packed tile of keys.
bool packs(const Attention& job, int64_t rows) {
  const int32_t pool = job.pool.dtype;
  return rows > kFewRows && kernels().bfloat16 && pool != KVG_FLOAT32 && pool != KVG_FLOAT16;
}

class TileTask : AttentionTask {
 public:
  TileTask(const Attention& job, Partial& partial, const Tile& tile, int64_t first_head,
           int64_t last_head)
      : AttentionTask(job, partial, tile, first_head, last_head),
        packs_(packs(job, rows_)),
        step_(rows_ > kFewRows ? kKeys : step_of(1, kAhead * kLine, 4)),
        in_place_(reads_in_place()) {}

  void run() {
    const int64_t packed = (std::max(D_, E_) + kKeys - 1) / kKeys * kKeys;  // lines of kKeys / 2 pairs
    const int64_t queries = lines_of(heads() * rows_ * (D_ + 1));
    const int64_t converted = lines_of(kKeys * std::max({D_, E_, rows_}));
    Line* room = make_room(packed + queries + converted);
    packed_ = reinterpret_cast<uint32_t*>(room);
    q_ = room[packed].floats;
    converted_ = room[packed + queries].floats;
    load_queries();
    each_tile(first_tile(), [this](const KeyTile& tile, const KeyTile& next) { attend(tile, next); });
    leave();
  }

 private:
  int64_t pairs() const { return (D_ + 1) / 2; }  // of elements of a query

  // Queries in bfloat16, rows of pairs() words.
  uint16_t* bfloat16_queries(int64_t head) const {
    return reinterpret_cast<uint16_t*>(q_ + state_of(head) * (D_ + 1));
  }

  void load_queries() {
    each_query([this](int64_t head, int64_t row, const float* q) {
      if (packs_) {
        uint16_t* to = bfloat16_queries(head) + row * 2 * pairs();
        dtype(KVG_BFLOAT16).from_float(q, to, static_cast<size_t>(2 * pairs()));
      } else {
        float* to = q_ + (state_of(head) + row) * D_;
        std::memcpy(to, q, static_cast<size_t>(D_) * sizeof(float));
      }
    });
  }

  void attend(const KeyTile& tile, const KeyTile& next) {
    each_step(tile, 0, step_, tile.rows[1],
              [&](int64_t head, int64_t j, int64_t keys, Ahead& ahead) {
                ahead.ask(step_ * row_size_ / kLine);
                dot(tile, head, j, keys);
              });
    for (int64_t head = first_head_; head < last_head_; ++head) weigh(head, tile);
    const KeyTile& after = next.keys ? next : tile;
    each_step(tile, 1, step_, after.rows[0],
              [&](int64_t head, int64_t j, int64_t keys, Ahead& ahead) {
                ahead.ask(step_ * row_size_ / kLine);
                add(tile, head, j, keys);
              });
  }

  void dot(const KeyTile& tile, int64_t head, int64_t first, int64_t keys) {
    const void* rows[kKeys];
    read(tile, 0, head, D_, first, keys, rows);
    float* scores = scores_of(head) + first;
    if (packs_) {
      pack(kernels_.bfloat16->pack_keys, tile, 0, head, D_, keys, rows);
      const auto* q = reinterpret_cast<const uint32_t*>(bfloat16_queries(head));
      return kernels_.bfloat16->dot_packed(q, packed_, scores, rows_, pairs());
    }
    const float* q = q_ + state_of(head) * D_;
    if (!scaled_in_place()) return kernels_.dot(q, rows, read_as(), scores, rows_, D_, D_, keys);
    for (int64_t at = 0; at < D_; at += block_) {
      float* part = at ? converted_ : scores;  // free: nothing is converted
      kernels_.dot(q + at, rows, read_as(), part, rows_, block_, D_, keys);
      load_factors(tile, 0, head, at, first, keys);
      for (int64_t row = 0; row < rows_; ++row)
        for (int64_t j = 0; j < keys; ++j) part[row * kKeys + j] *= factors_[j];
      for (int64_t row = 0; at && row < rows_; ++row)
        for (int64_t j = 0; j < keys; ++j) scores[row * kKeys + j] += part[row * kKeys + j];
      for (int64_t j = 0; j < keys; ++j) rows[j] = static_cast<const char*>(rows[j]) + block_;
    }
  }

  void add(const KeyTile& tile, int64_t head, int64_t first, int64_t keys) {
    const void* rows[kKeys];
    read(tile, 1, head, E_, first, keys, rows);
    const float* weights = scores_of(head) + first;
    float* out = out_of(head);
    if (packs_) {
      pack(kernels_.bfloat16->pack_values, tile, 1, head, E_, keys, rows);
      return kernels_.bfloat16->add_packed(weights, packed_, out, rows_, E_, keys);
    }
    if (!scaled_in_place())
      return kernels_.add(weights, rows, read_as(), out, rows_, E_, E_, keys);
    float* part = converted_;
    for (int64_t at = 0; at < E_; at += block_) {
      load_factors(tile, 1, head, at, first, keys);
      for (int64_t row = 0; row < rows_; ++row)
        for (int64_t j = 0; j < keys; ++j)
          part[row * kKeys + j] = weights[row * kKeys + j] * factors_[j];
      kernels_.add(part, rows, read_as(), out + at, rows_, std::min(block_, E_ - at), E_, keys);
      for (int64_t j = 0; j < keys; ++j) rows[j] = static_cast<const char*>(rows[j]) + block_;
    }
  }

  void pack(decltype(BFloat16Kernels::pack_keys) run, const KeyTile& tile, int kind, int64_t head,
            int64_t width, int64_t keys, const void* const* rows) {
    if (scaled_in_place()) load_factors(tile, kind, head, 0, 0, keys);
    run(rows, read_as(), scaled_in_place() ? factors_ : nullptr, packed_, width, keys);
  }

  // Packing takes the one scale of a key; other blocks are converted first.
  bool reads_in_place() const {
    const int32_t pool = job_.pool.dtype;
    if (packs_)
      return pool == KVG_BFLOAT16 || (pool == KVG_INT8 && block_ == D_);
    return pool == KVG_FLOAT32 || (reads_as_stored(pool) && rows_ <= kFewRows);
  }

  // Whether the kernels read quantised elements, so that a scale is applied once per key and block.
  bool scaled_in_place() const { return in_place_ && job_.pool.scales; }
  int32_t read_as() const { return in_place_ ? job_.pool.dtype : KVG_FLOAT32; }

  // The scales of the block at element `at` of a head, of `keys` keys.
  void load_factors(const KeyTile& tile, int kind, int64_t head, int64_t at, int64_t first,
                    int64_t keys) {
    const int64_t block = head * job_.pool.scales_per_head + at / block_;
    for (int64_t j = 0; j < keys; ++j) factors_[j] = tile.scales[kind][first + j][block];
  }

  // Points `rows` at `width` elements of each key: in the pool itself, or converted where the
  // kernels do not read its dtype or many query rows share the conversion.
  void read(const KeyTile& tile, int kind, int64_t head, int64_t width, int64_t first, int64_t keys,
            const void** rows) {
    for (int64_t j = 0; j < keys; ++j)
      rows[j] = tile.rows[kind][first + j] + head * D_ * size_;
    for (int64_t j = 0; !in_place_ && j < keys; ++j) {
      float* to = converted_ + j * width;
      dtype(job_.pool.dtype).to_float(rows[j], to, static_cast<size_t>(width));
      if (job_.pool.scales)
        dequantize(to, tile.scales[kind][first + j] + head * job_.pool.scales_per_head, width);
      rows[j] = to;
    }
  }

  void dequantize(float* x, const float* scales, int64_t width) const {
    for (int64_t begin = 0; begin < width; begin += block_)
      kernels_.scale(x + begin, *scales++, std::min(block_, width - begin));
  }

  const bool packs_;
  const int64_t step_;  // keys of a tile at a time, of all heads
  const bool in_place_;
  uint32_t* packed_;  // a tile of K or V
  float* q_;          // [heads, M, D + 1]
  float* converted_;  // [J, max(D, E)] or, of blocks, [M, J]
  float factors_[kKeys] = {};
};

}  // namespace

void attend_tile(const Attention& job, Partial& partial, const Tile& tile, int64_t first_head,
                 int64_t last_head) {
  if (!attend_stream(job, partial, tile, first_head, last_head))
    TileTask(job, partial, tile, first_head, last_head).run();
}

}  // namespace kvg
