#include "cpu/attention_tile.h"

#include <cstring>

#include "cpu/attention_stream.h"
#include "cpu/attention_task.h"

namespace kvg {
namespace {

constexpr int64_t kAhead = 32;  // lines of a head that a step of few rows reads

// Kernels with products of 16-bit words, if the processor has them: of integers, or of bfloat16,
// which is as precise as bfloat16 and float8 pools. Few rows use them too, so that a token's result
// does not depend on the number of rows. Null: products are in float32.
const TileKernels* kernels_of(const Pool& pool) {
  return kernels().tiles[fits_integers(pool) ? pool.dtype : KVG_BFLOAT16];
}

class TileTask : AttentionTask {
 public:
  TileTask(const Attention& job, Partial& partial, const Tile& tile, int64_t first_head,
           int64_t last_head)
      : AttentionTask(job, partial, tile, first_head, last_head),
        packed_kernels_(kernels_of(job.pool)),
        step_(packed_kernels_ || rows_ > kFewRows ? kKeys : step_of(1, kAhead * kLine, 4)),
        in_place_(reads_in_place()) {}

  void run() {
    const int64_t packed = (std::max(D_, E_) + kKeys - 1) / kKeys * kKeys;  // lines of kKeys / 2 pairs
    const int64_t queries = lines_of(heads() * rows_ * query_size());
    const int64_t units = lines_of(heads() * rows_);
    const int64_t converted = lines_of(kKeys * std::max(D_, E_));
    const int64_t part = lines_of(rows_ * kKeys);
    Line* room = make_room(packed + queries + units + converted + part);
    packed_ = reinterpret_cast<uint32_t*>(room);
    q_ = room[packed].floats;
    units_ = room[packed + queries].floats;
    converted_ = room[packed + queries + units].floats;
    part_ = room[packed + queries + units + converted].floats;
    load_queries();
    each_tile(first_tile(), [this](const KeyTile& tile, const KeyTile& next) { attend(tile, next); });
    leave();
  }

 private:
  // Size of a query: in floats, or in pairs of words, which fill whole vectors.
  int64_t query_size() const {
    return packed_kernels_ ? (D_ + kKeys - 1) / kKeys * (kKeys / 2) : D_;
  }

  float* query_of(int64_t head, int64_t row) const {
    return q_ + (state_of(head) + row) * query_size();
  }

  void load_queries() {
    each_query([this](int64_t head, int64_t row, const float* q) {
      float* to = query_of(head, row);
      if (packed_kernels_)
        units_[state_of(head) + row] =
            packed_kernels_->pack_query(q, reinterpret_cast<uint32_t*>(to), D_);
      else
        std::memcpy(to, q, static_cast<size_t>(D_) * sizeof(float));
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
    const float* q = query_of(head, 0);
    if (packed_kernels_) {
      packed_kernels_->pack_keys(rows, read_as(), scales_of(tile, 0, head), block_, packed_, D_, keys);
      return packed_kernels_->dot(reinterpret_cast<const uint32_t*>(q), units_ + state_of(head),
                                  packed_, factors_of(tile, 0, head, keys), scores, rows_, D_);
    }
    if (!job_.pool.scales) return kernels_.dot(q, rows, read_as(), scores, rows_, D_, D_, keys);
    for (int64_t at = 0; at < D_; at += block_) {
      float* part = at ? part_ : scores;
      kernels_.dot(q + at, rows, read_as(), part, rows_, block_, D_, keys);
      load_factors(tile, 0, head, at, first, keys);
      for (int64_t row = 0; row < rows_; ++row)
        for (int64_t j = 0; j < keys; ++j) part[row * kKeys + j] *= factors_[j];
      for (int64_t row = 0; at && row < rows_; ++row)
        for (int64_t j = 0; j < keys; ++j) scores[row * kKeys + j] += part[row * kKeys + j];
      to_next_block(keys, rows);
    }
  }

  void add(const KeyTile& tile, int64_t head, int64_t first, int64_t keys) {
    const void* rows[kKeys];
    read(tile, 1, head, E_, first, keys, rows);
    const float* weights = scores_of(head) + first;
    float* out = out_of(head);
    if (packed_kernels_) {
      packed_kernels_->pack_values(rows, read_as(), scales_of(tile, 1, head), block_, packed_, E_,
                                   keys);
      return packed_kernels_->add(weights, packed_, factors_of(tile, 1, head, keys), out, rows_, E_,
                                  keys, keys_of_sum());
    }
    if (!job_.pool.scales)
      return kernels_.add(weights, rows, read_as(), out, rows_, E_, E_, keys);
    for (int64_t at = 0; at < E_; at += block_) {
      load_factors(tile, 1, head, at, first, keys);
      for (int64_t row = 0; row < rows_; ++row)
        for (int64_t j = 0; j < keys; ++j)
          part_[row * kKeys + j] = weights[row * kKeys + j] * factors_[j];
      kernels_.add(part_, rows, read_as(), out + at, rows_, std::min(block_, E_ - at), E_, keys);
      to_next_block(keys, rows);
    }
  }

  // Scales of the blocks of each key, for packing a tile; null if there are none, or if they are
  // applied to scores and weights, or were applied by a conversion.
  const float* const* scales_of(const KeyTile& tile, int kind, int64_t head) {
    if (!in_place_ || !job_.pool.scales || scales_after()) return nullptr;
    for (int64_t j = 0; j < kKeys; ++j)
      scales_[j] = tile.scales[kind][j] + head * job_.pool.scales_per_head;
    return scales_;
  }

  // The only scale of each key of a packed tile; null if there is none, or if each block has one.
  const float* factors_of(const KeyTile& tile, int kind, int64_t head, int64_t keys) {
    if (!scales_after()) return nullptr;
    load_factors(tile, kind, head, 0, 0, keys);
    return factors_;
  }

  bool scales_after() const { return packed_kernels_ && job_.pool.scales && block_ == D_; }

  bool reads_in_place() const {
    const int32_t pool = job_.pool.dtype;
    if (packed_kernels_) return !job_.pool.scales || scales_after() || block_ % kKeys == 0;
    return pool == KVG_FLOAT32 || (reads_as_stored(pool) && rows_ <= kFewRows);
  }

  void to_next_block(int64_t keys, const void** rows) const {
    const int64_t size = block_ * static_cast<int64_t>(in_place_ ? size_ : sizeof(float));
    for (int64_t j = 0; j < keys; ++j) rows[j] = static_cast<const char*>(rows[j]) + size;
  }

  int32_t read_as() const { return in_place_ ? job_.pool.dtype : KVG_FLOAT32; }

  // Loads the scales of `keys` keys for the block at element `at` of a head.
  void load_factors(const KeyTile& tile, int kind, int64_t head, int64_t at, int64_t first,
                    int64_t keys) {
    const int64_t block = head * job_.pool.scales_per_head + at / block_;
    for (int64_t j = 0; j < keys; ++j) factors_[j] = tile.scales[kind][first + j][block];
  }

  // Points `rows` at `width` elements of each key: in the pool itself, or converted if the kernels
  // do not read its dtype or many query rows share the conversion. Scales are applied to scores and
  // weights; if blocks of packed tiles have their own scales, to the elements.
  void read(const KeyTile& tile, int kind, int64_t head, int64_t width, int64_t first, int64_t keys,
            const void** rows) {
    for (int64_t j = 0; j < keys; ++j)
      rows[j] = tile.rows[kind][first + j] + head * D_ * size_;
    for (int64_t j = 0; !in_place_ && j < keys; ++j) {
      float* to = converted_ + j * width;
      dtype(job_.pool.dtype).to_float(rows[j], to, static_cast<size_t>(width));
      if (packed_kernels_ && job_.pool.scales && !scales_after())
        dequantize(to, tile.scales[kind][first + j] + head * job_.pool.scales_per_head, width);
      rows[j] = to;
    }
  }

  void dequantize(float* x, const float* scales, int64_t width) const {
    for (int64_t begin = 0; begin < width; begin += block_)
      kernels_.scale(x + begin, *scales++, std::min(block_, width - begin));
  }

  const TileKernels* const packed_kernels_;  // null: products are in float32
  const int64_t step_;  // keys of all heads that are multiplied at a time
  const bool in_place_;
  uint32_t* packed_;  // packed tile of K or V
  float* q_;          // [heads, M, query_size()]
  float* units_;      // units of the queries, [heads, M]
  float* converted_;  // [J, max(D, E)]
  float* part_;       // scores of a block, or weights times its scales, [M, J]
  float factors_[kKeys] = {};
  const float* scales_[kKeys];
};

}  // namespace

void attend_tile(const Attention& job, Partial& partial, const Tile& tile, int64_t first_head,
                 int64_t last_head) {
  if (!attend_stream(job, partial, tile, first_head, last_head))
    TileTask(job, partial, tile, first_head, last_head).run();
}

}  // namespace kvg
