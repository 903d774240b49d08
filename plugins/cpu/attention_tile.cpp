// Legend: M query rows of one kv head (tile of new tokens x its query heads, token-major), D
// head_dim, E v_head_dim, J keys of a tile. Scores are in units of log2(e): weights are powers of 2.
#include "cpu/attention_tile.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "cpu/kernels.h"

namespace kvg {
namespace {

constexpr int64_t kFewRows = 8;  // up to here K and V are converted as they are read
constexpr int64_t kLine = 64;    // bytes that memory gives at once
constexpr int64_t kAhead = 32;   // lines that few rows ask for one step ahead
constexpr float kLog2e = 1.442695041f;

// How K and V are multiplied. A pool of bfloat16 or fewer bits has lost what bfloat16 queries and
// weights lose, and its products are in bfloat16 where the processor has them.
enum class Products {
  kFloat32,
  kBFloat16,  // few rows of a bfloat16 pool, as it lies
  kPacked,    // many rows: a tile of keys is packed for all of them
};

Products products_of(const Attention& job, int64_t rows) {
  const int32_t pool = job.pool.dtype;
  if (!kernels().bfloat16 || pool == KVG_FLOAT32 || pool == KVG_FLOAT16) return Products::kFloat32;
  if (rows > kFewRows) return Products::kPacked;
  return pool == KVG_BFLOAT16 ? Products::kBFloat16 : Products::kFloat32;
}

struct alignas(64) Line {
  float floats[16];
};

// Lines that `count` floats take.
int64_t lines_of(int64_t count) { return (count + 15) / 16; }

// One task: a tile of queries of some kv heads, over the keys of its part.
class Worker {
 public:
  Worker(const Attention& job, Partial& partial, const Tile& tile, int64_t first_head,
         int64_t last_head)
      : job_(job),
        partial_(partial),
        tile_(tile),
        first_head_(first_head),
        last_head_(last_head),
        group_(job.heads / job.pool.kv_heads),
        rows_((tile.end - tile.begin) * group_),
        D_(job.pool.head_dim),
        E_(job.v_head_dim),
        size_(static_cast<int64_t>(dtype(job.pool.dtype).size)),
        step_(rows_ > kFewRows ? kKeys
                               : std::clamp<int64_t>(kAhead * kLine / (D_ * size_), 4, kKeys)),
        block_(job.pool.scales ? D_ / job.pool.scales_per_head : D_),
        scale_(job.softcap ? job.scale / job.softcap : job.scale * kLog2e),
        softcap_(job.softcap * kLog2e),
        products_(products_of(job, rows_)),
        in_place_(reads_in_place()) {}

  void run() {
    const int64_t state = (last_head_ - first_head_) * rows_;
    const int64_t packed = (std::max(D_, E_) + kKeys - 1) / kKeys * kKeys;  // lines of kKeys / 2 pairs
    const int64_t needed =
        packed + lines_of(state * (D_ + 1 + E_ + kKeys) + kKeys * std::max({D_, E_, rows_}));
    static thread_local std::vector<Line> lines;
    static thread_local std::vector<Softmax> softmax;
    if (lines.size() < static_cast<size_t>(needed)) lines.resize(static_cast<size_t>(needed));
    softmax.assign(static_cast<size_t>(state), Softmax{-kInfinity, 0});
    packed_ = reinterpret_cast<uint32_t*>(lines.data());
    q_ = lines[static_cast<size_t>(packed)].floats;
    out_ = q_ + state * (D_ + 1);
    scores_ = out_ + state * E_;
    converted_ = scores_ + state * kKeys;
    softmax_ = softmax.data();
    std::fill(out_, out_ + state * E_, 0.0f);
    load_queries();
    const Keys keys = part_keys();
    KeyTile tiles[2];
    find(keys.first, keys.last, tiles[0]);
    for (int at = 0; tiles[at].keys > 0; at = 1 - at) {
      find(tiles[at].first + tiles[at].keys, keys.last, tiles[1 - at]);
      attend(tiles[at], tiles[1 - at]);
    }
    for (int64_t head = first_head_; head < last_head_; ++head)
      tile_.parts > 1 ? save_partial(head) : finish(head);
  }

 private:
  int64_t position(int64_t token) const { return job_.rows.cached[tile_.row] + token; }

  // Elements before query head `head` of new token `token` of the row, in rows `width` wide.
  int64_t element(int64_t token, int64_t head, int64_t width) const {
    return ((job_.rows.begin(tile_.row) + token) * job_.heads + head) * width;
  }

  int64_t state_of(int64_t head) const { return (head - first_head_) * rows_; }
  float* scores_of(int64_t head) const { return scores_ + state_of(head) * kKeys; }
  int64_t pairs() const { return (D_ + 1) / 2; }  // of elements of a query

  // Queries in bfloat16: rows of D, or of pairs() words.
  uint16_t* bfloat16_queries(int64_t head) const {
    return reinterpret_cast<uint16_t*>(q_ + state_of(head) * (D_ + 1));
  }

  // The keys that any query of the tile sees, and of them this part.
  Keys part_keys() const {
    const int64_t first = keys_of(job_, tile_.row, position(tile_.begin)).first;
    const int64_t last = keys_of(job_, tile_.row, position(tile_.end - 1)).last;
    const int64_t part = (last - first + tile_.parts - 1) / tile_.parts;
    const int64_t begin = first + tile_.part * part;
    return {begin, std::min(last, begin + part)};
  }

  // Q rotated, as float32 or bfloat16.
  void load_queries() {
    const Dtype& type = dtype(job_.dtype);
    const auto width = static_cast<size_t>(D_);
    std::vector<char> rounded(job_.rope ? width * type.size : 0);
    std::vector<float> wide(width + 1);  // and a 0 that fills the last pair
    const int64_t stride = products_ == Products::kPacked ? 2 * pairs() : D_;
    for (int64_t head = first_head_; head < last_head_; ++head)
      for (int64_t row = 0; row < rows_; ++row) {
        const int64_t token = tile_.begin + row / group_;
        const int64_t from = element(token, head * group_ + row % group_, D_);
        type.to_float(job_.q + from * static_cast<int64_t>(type.size), wide.data(), width);
        if (job_.rope) {  // rotated queries are rounded to their dtype, as rotated keys are
          job_.rope.apply(wide.data(), position(token));
          type.from_float(wide.data(), rounded.data(), width);
          type.to_float(rounded.data(), wide.data(), width);
        }
        if (products_ == Products::kFloat32) {
          std::memcpy(q_ + (state_of(head) + row) * D_, wide.data(), width * sizeof(float));
        } else {
          dtype(KVG_BFLOAT16)
              .from_float(wide.data(), bfloat16_queries(head) + row * stride,
                          static_cast<size_t>(stride));
        }
      }
  }

  // Up to kKeys keys of the row, and where their first heads lie: [K or V][key].
  struct KeyTile {
    int64_t first = 0, keys = 0;
    const char* rows[2][kKeys];
    const float* scales[2][kKeys];  // of a quantised pool
  };

  void find(int64_t first, int64_t end, KeyTile& tile) const {
    const Pool& pool = job_.pool;
    tile.first = first;
    tile.keys = std::clamp<int64_t>(end - first, 0, kKeys);
    int64_t offset = first % job_.rows.page_size;
    for (int64_t j = 0, count; j < tile.keys; j += count, offset = 0) {
      const int64_t page = job_.rows.page(tile_.row, first + j);
      count = std::min(tile.keys - j, job_.rows.page_size - offset);
      for (int kind : {0, 1}) {
        const int64_t slot = pool.at(page, offset, kind);
        for (int64_t i = 0; i < count; ++i)
          tile.rows[kind][j + i] = pool.data + (slot + i * pool.token_stride) * size_;
        for (int64_t i = 0; pool.scales && i < count; ++i)
          tile.scales[kind][j + i] = pool.scales + slot / block_ + i * pool.token_stride / block_;
      }
    }
  }

  // Every head of the task over one tile. Few query rows read K and V in the order in which they
  // lie, a few keys of all heads at a time: memory streams. Many compute longer than they read.
  void attend(const KeyTile& tile, const KeyTile& next) {
    for (int64_t j = 0; j < tile.keys; j += step_)
      for (int64_t head = first_head_; head < last_head_; ++head) {
        j + step_ < tile.keys ? prefetch(tile, 0, head, j + step_) : prefetch(tile, 1, head, 0);
        dot(tile, head, j, std::min(step_, tile.keys - j));
      }
    for (int64_t head = first_head_; head < last_head_; ++head) weigh(head, tile.first, tile.keys);
    for (int64_t j = 0; j < tile.keys; j += step_)
      for (int64_t head = first_head_; head < last_head_; ++head) {
        j + step_ < tile.keys ? prefetch(tile, 1, head, j + step_) : prefetch(next, 0, head, 0);
        add(tile, head, j, std::min(step_, tile.keys - j));
      }
  }

  // Asks memory for what the head reads one step from now: hardware prefetchers stop at a page's end.
  // Inlined, as GCC takes a function that only prefetches for one without effects, and drops it.
  [[gnu::always_inline]] void prefetch(const KeyTile& tile, int kind, int64_t head,
                                       int64_t first) const {
    const int64_t begin = head * D_ * size_, end = begin + (kind ? E_ : D_) * size_;
    const int64_t last = std::min(tile.keys, first + step_);
    for (int64_t j = first; j < last; ++j)
      for (int64_t byte = begin; byte < end; byte += kLine)
        __builtin_prefetch(tile.rows[kind][j] + byte);
    for (int64_t j = first; job_.pool.scales && j < last; ++j)
      __builtin_prefetch(tile.scales[kind][j] + head * job_.pool.scales_per_head);
  }

  void dot(const KeyTile& tile, int64_t head, int64_t first, int64_t keys) {
    const void* rows[kKeys];
    read(tile, 0, head, D_, first, keys, rows);
    float* scores = scores_of(head) + first;
    if (products_ == Products::kPacked) {
      pack(kernels_.bfloat16->pack_keys, tile, 0, head, D_, keys, rows);
      const auto* q = reinterpret_cast<const uint32_t*>(bfloat16_queries(head));
      return kernels_.bfloat16->dot_packed(q, packed_, scores, rows_, pairs());
    }
    if (products_ == Products::kBFloat16)
      return kernels_.bfloat16->dot(bfloat16_queries(head), rows, scores, rows_, D_, keys);
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
    float* out = out_ + state_of(head) * E_;
    if (products_ == Products::kPacked) {
      pack(kernels_.bfloat16->pack_values, tile, 1, head, E_, keys, rows);
      return kernels_.bfloat16->add_packed(weights, packed_, out, rows_, E_, keys);
    }
    if (products_ == Products::kBFloat16)
      return kernels_.bfloat16->add(weights, rows, out, rows_, E_, keys);
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
    if (products_ == Products::kPacked)
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

  void weigh(int64_t head, int64_t first, int64_t keys) {
    for (int64_t row = 0; row < rows_; row += group_) {  // of one token
      const Keys seen = keys_of(job_, tile_.row, position(tile_.begin + row / group_));
      const int64_t begin = std::clamp<int64_t>(seen.first - first, 0, keys);
      const int64_t end = std::clamp<int64_t>(seen.last - first, begin, keys);
      const int64_t state = state_of(head) + row;
      kernels_.weigh(scores_of(head) + row * kKeys, group_, begin, end, scale_, softcap_,
                     softmax_ + state, out_ + state * E_, E_);
    }
  }

  void finish(int64_t head) {
    const Dtype& type = dtype(job_.dtype);
    for (int64_t row = 0; row < rows_; ++row) {
      const int64_t query_head = head * group_ + row % group_;
      const int64_t state = state_of(head) + row;
      float* out = out_ + state * E_;
      kernels_.finish(softmax_[state], sink_of(job_, query_head), out, E_);
      const int64_t to = element(tile_.begin + row / group_, query_head, E_);
      type.from_float(out, job_.out + to * static_cast<int64_t>(type.size),
                      static_cast<size_t>(E_));
    }
  }

  void save_partial(int64_t head) {
    for (int64_t row = 0; row < rows_; ++row) {
      const int64_t state = state_of(head) + row;
      float* to = partial_.at(tile_.partial + head * rows_ + row);
      to[0] = softmax_[state].top, to[1] = softmax_[state].sum;
      std::memcpy(to + 2, out_ + state * E_, static_cast<size_t>(E_) * sizeof(float));
    }
  }

  const Kernels& kernels_ = kernels();
  const Attention& job_;
  Partial& partial_;
  const Tile& tile_;
  const int64_t first_head_, last_head_, group_, rows_, D_, E_;
  const int64_t size_;   // bytes of an element of the pool
  const int64_t step_;   // keys of a tile at a time, of all heads
  const int64_t block_;  // elements of a key that share a scale
  const float scale_, softcap_;  // scale_ makes a dot product what the softmax takes
  const Products products_;
  const bool in_place_;
  uint32_t* packed_;  // a tile of K or V
  // [heads, M, D + 1], [heads, M, E], [heads, M, J], [J, max(D, E)] or, of blocks, [M, J]
  float *q_, *out_, *scores_, *converted_;
  float factors_[kKeys] = {};
  Softmax* softmax_;                        // [heads, M]
};

}  // namespace

float sink_of(const Attention& job, int64_t query_head) {
  return job.sinks ? job.sinks[query_head] * kLog2e : -kInfinity;
}

void attend_tile(const Attention& job, Partial& partial, const Tile& tile, int64_t first_head,
                 int64_t last_head) {
  Worker(job, partial, tile, first_head, last_head).run();
}

}  // namespace kvg
