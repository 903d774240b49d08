// Legend: M query rows of one kv head (tile of new tokens x its query heads, token-major), D
// head_dim, E v_head_dim, J keys of a tile. Scores are in units of log2(e): weights are powers of 2.
#include "cpu/attention.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "cpu/kernels.h"
#include "cpu/parallel.h"

namespace kvg {
namespace {

constexpr int64_t kQueryRows = 64;       // M that a tile of new tokens aims at
constexpr int64_t kPartKeys = 256;       // a long context is split among tasks from here on
constexpr int64_t kMaxParts = 16;
constexpr int64_t kStateFloats = 32768;  // of one task: Q and output rows that stay in cache
constexpr int64_t kFewRows = 8;          // up to here K and V are converted as they are read
constexpr int64_t kStream = 8;           // keys that few rows take at a time, of all heads
constexpr float kLog2e = 1.442695041f;

// ---- tasks ------------------------------------------------------------------------------------

// New tokens [begin, end) of a row, and part `part` of the keys that they see. Parts of one tile
// follow each other in `partials`, from `partial` on.
struct Tile {
  int64_t row, begin, end, part, parts, partial;
};

// Positions of the row that a query at `position` sees: [first, last).
struct Keys {
  int64_t first, last;
};

Keys keys_of(const Attention& job, int64_t row, int64_t position) {
  const int64_t first = job.window ? std::max<int64_t>(0, position - job.window + 1) : 0;
  return {first, job.causal ? position + 1 : job.rows.length(row)};
}

// What a split context's tasks leave for the merge: per query row, softmax state and output.
struct Partial {
  std::vector<float> floats;
  int64_t stride;  // of one (tile part, query head): top, sum, E outputs

  float* at(int64_t index) { return floats.data() + index * stride; }
};

struct Plan {
  std::vector<Tile> tiles;
  std::vector<size_t> split;  // first tiles of the split ones
  int64_t heads_per_task, head_tasks;
  Partial partial;
};

// Cuts rows into tiles. Where a cut lies depends on its row only, so that a row's result is the
// same, bit for bit, in every batch and on every number of threads.
Plan plan(const Attention& job) {
  Plan p;
  const int64_t group = job.heads / job.pool.kv_heads;
  const int64_t tokens = std::max<int64_t>(1, kQueryRows / group);
  int64_t partials = 0, longest = 0;
  for (int64_t row = 0; row < job.rows.count; ++row) {
    const int64_t fresh = job.rows.fresh(row);
    for (int64_t begin = 0; begin < fresh; begin += tokens) {
      const int64_t end = std::min(fresh, begin + tokens);
      const int64_t cached = job.rows.cached[row];
      const int64_t seen = keys_of(job, row, cached + end - 1).last -
                           keys_of(job, row, cached + begin).first;
      const int64_t parts =
          fresh > tokens ? 1 : std::clamp<int64_t>(seen / kPartKeys, 1, kMaxParts);
      if (parts > 1) p.split.push_back(p.tiles.size());
      for (int64_t part = 0; part < parts; ++part)
        p.tiles.push_back({row, begin, end, part, parts, partials + part * (end - begin) * job.heads});
      if (parts > 1) partials += parts * (end - begin) * job.heads;
      longest = std::max(longest, end - begin);
    }
  }
  p.partial.stride = 2 + job.v_head_dim;
  p.partial.floats.resize(static_cast<size_t>(partials * p.partial.stride));
  // A task takes several kv heads of its tokens, which lie side by side, unless threads would idle.
  const int64_t state = longest * group * (job.pool.head_dim + job.v_head_dim);
  const int64_t fit = std::max<int64_t>(1, kStateFloats / std::max<int64_t>(1, state));
  const int64_t tiles = std::max<int64_t>(1, static_cast<int64_t>(p.tiles.size()));
  const int64_t wanted = 4 * static_cast<int64_t>(parallelism(job.call));
  const int64_t cuts = std::clamp<int64_t>((wanted + tiles - 1) / tiles, 1, job.pool.kv_heads);
  p.heads_per_task = std::min(fit, (job.pool.kv_heads + cuts - 1) / cuts);
  p.head_tasks = (job.pool.kv_heads + p.heads_per_task - 1) / p.heads_per_task;
  return p;
}

// In units of log2(e); -infinity: none.
float sink_of(const Attention& job, int64_t query_head) {
  return job.sinks ? job.sinks[query_head] * kLog2e : -kInfinity;
}

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
        block_(job.pool.scales ? D_ / job.pool.scales_per_head : D_),
        in_bfloat16_(kernels_.dot_bf16 && job.dtype == KVG_BFLOAT16 &&
                     job.pool.dtype == KVG_BFLOAT16),
        in_place_(in_bfloat16_ || (reads_as_stored(job.pool.dtype) &&
                                   (job.pool.dtype == KVG_FLOAT32 || rows_ <= kFewRows))) {}

  void run() {
    const int64_t state = (last_head_ - first_head_) * rows_;
    const int64_t needed = state * (D_ + E_ + kKeys) + kKeys * std::max({D_, E_, rows_});
    static thread_local std::vector<float> floats;
    static thread_local std::vector<Softmax> softmax;
    if (floats.size() < static_cast<size_t>(needed)) floats.resize(static_cast<size_t>(needed));
    softmax.assign(static_cast<size_t>(state), Softmax{-kInfinity, 0});
    q_ = floats.data();
    out_ = q_ + state * D_;
    scores_ = out_ + state * E_;
    converted_ = scores_ + state * kKeys;
    softmax_ = softmax.data();
    std::fill(out_, out_ + state * E_, 0.0f);
    load_queries();
    const Keys keys = part_keys();
    for (KeyTile tile = key_tile(keys.first, keys.last), next; tile.keys > 0; tile = next) {
      next = key_tile(tile.first + tile.keys, keys.last);
      attend_tile(tile, next);
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
  uint16_t* queries_bf16(int64_t head) const {
    return reinterpret_cast<uint16_t*>(q_ + state_of(head) * D_);
  }

  // The keys that any query of the tile sees, and of them this part.
  Keys part_keys() const {
    const int64_t first = keys_of(job_, tile_.row, position(tile_.begin)).first;
    const int64_t last = keys_of(job_, tile_.row, position(tile_.end - 1)).last;
    const int64_t part = (last - first + tile_.parts - 1) / tile_.parts;
    const int64_t begin = first + tile_.part * part;
    return {begin, std::min(last, begin + part)};
  }

  // What makes a dot product what the softmax takes.
  float scale() const { return job_.softcap ? job_.scale / job_.softcap : job_.scale * kLog2e; }

  // Q as float32, rotated and scaled; where the kernels take bfloat16, as that and not scaled.
  void load_queries() {
    const Dtype& type = dtype(job_.dtype);
    std::vector<char> rounded(job_.rope ? static_cast<size_t>(D_) * type.size : 0);
    for (int64_t head = first_head_; head < last_head_; ++head)
      for (int64_t row = 0; row < rows_; ++row) {
        const int64_t token = tile_.begin + row / group_;
        const int64_t from = element(token, head * group_ + row % group_, D_);
        float* q = q_ + (state_of(head) + row) * D_;
        const size_t width = static_cast<size_t>(D_);
        type.to_float(job_.q + from * static_cast<int64_t>(type.size), q, width);
        if (job_.rope) {  // rotated queries are rounded to their dtype, as rotated keys are
          job_.rope.apply(q, position(token));
          type.from_float(q, rounded.data(), width);
          type.to_float(rounded.data(), q, width);
        }
        if (in_bfloat16_)
          type.from_float(q, queries_bf16(head) + row * D_, width);  // exact
        else
          kernels_.scale(q, scale(), D_);
      }
  }

  // Up to kKeys keys of the row, and where in the pool their first heads lie: [K or V][key].
  struct KeyTile {
    int64_t first = 0, keys = 0;
    int64_t slots[2][kKeys];
    int64_t groups[2][kKeys];  // the same in scales, of a quantised pool
  };

  KeyTile key_tile(int64_t first, int64_t end) const {
    KeyTile tile;
    tile.first = first;
    tile.keys = std::clamp<int64_t>(end - first, 0, kKeys);
    int64_t offset = first % job_.rows.page_size;
    for (int64_t j = 0; j < tile.keys; offset = 0) {
      const int64_t page = job_.rows.page(tile_.row, first + j);
      for (; j < tile.keys && offset < job_.rows.page_size; ++j, ++offset)
        for (int kind : {0, 1}) {
          tile.slots[kind][j] = job_.pool.at(page, offset, kind);
          if (job_.pool.scales) tile.groups[kind][j] = tile.slots[kind][j] / block_;
        }
    }
    return tile;
  }

  // Every head of the task over one tile. Few query rows read K and V in the order in which they
  // lie, a few keys of all heads at a time: memory streams. Many compute longer than they read.
  void attend_tile(const KeyTile& tile, const KeyTile& next) {
    const int64_t step = rows_ <= kFewRows ? kStream : kKeys;
    for (int64_t j = 0; j < tile.keys; j += step)
      for (int64_t head = first_head_; head < last_head_; ++head) {
        j + step < tile.keys ? prefetch(tile, 0, head, D_, j + step, step)
                             : prefetch(tile, 1, head, E_, 0, step);
        dot(tile, head, j, std::min(step, tile.keys - j));
      }
    for (int64_t head = first_head_; head < last_head_; ++head) weigh(head, tile.first, tile.keys);
    for (int64_t j = 0; j < tile.keys; j += step)
      for (int64_t head = first_head_; head < last_head_; ++head) {
        j + step < tile.keys ? prefetch(tile, 1, head, E_, j + step, step)
                             : prefetch(next, 0, head, D_, 0, step);
        add(tile, head, j, std::min(step, tile.keys - j));
      }
  }

  // Asks memory for what is read one step from now: hardware prefetchers stop at a page's end.
  void prefetch(const KeyTile& tile, int kind, int64_t head, int64_t width, int64_t first,
                int64_t keys) const {
    constexpr int64_t kLine = 64;
    const int64_t size = static_cast<int64_t>(dtype(job_.pool.dtype).size);
    for (int64_t j = first; j < std::min(tile.keys, first + keys); ++j) {
      const char* from = job_.pool.data + (tile.slots[kind][j] + head * D_) * size;
      for (int64_t byte = 0; byte < width * size; byte += kLine) __builtin_prefetch(from + byte);
      if (job_.pool.scales)
        __builtin_prefetch(job_.pool.scales + tile.groups[kind][j] + head * D_ / block_);
    }
  }

  void dot(const KeyTile& tile, int64_t head, int64_t first, int64_t keys) {
    const void* rows[kKeys];
    read(tile, 0, head, D_, first, keys, rows);
    float* scores = scores_of(head) + first;
    if (in_bfloat16_) return kernels_.dot_bf16(queries_bf16(head), rows, scores, rows_, D_, keys);
    const float* q = q_ + state_of(head) * D_;
    if (!scaled_in_place()) return kernels_.dot(q, rows, read_as(), scores, rows_, D_, D_, keys);
    for (int64_t at = 0; at < D_; at += block_) {
      float* part = at ? converted_ : scores;  // free: nothing is converted
      kernels_.dot(q + at, rows, read_as(), part, rows_, block_, D_, keys);
      load_factors(tile, 0, head * D_ + at, first, keys);
      for (int64_t row = 0; row < rows_; ++row)
        for (int64_t j = 0; j < kStream; ++j) part[row * kKeys + j] *= factors_[j];
      for (int64_t row = 0; at && row < rows_; ++row)
        for (int64_t j = 0; j < kStream; ++j) scores[row * kKeys + j] += part[row * kKeys + j];
      for (int64_t j = 0; j < keys; ++j) rows[j] = static_cast<const char*>(rows[j]) + block_;
    }
  }

  void add(const KeyTile& tile, int64_t head, int64_t first, int64_t keys) {
    const void* rows[kKeys];
    read(tile, 1, head, E_, first, keys, rows);
    const float* weights = scores_of(head) + first;
    float* out = out_ + state_of(head) * E_;
    if (in_bfloat16_) return kernels_.add_bf16(weights, rows, out, rows_, E_, keys);
    if (!scaled_in_place())
      return kernels_.add(weights, rows, read_as(), out, rows_, E_, E_, keys);
    float* part = converted_;
    for (int64_t at = 0; at < E_; at += block_) {
      load_factors(tile, 1, head * D_ + at, first, keys);
      for (int64_t row = 0; row < rows_; ++row)
        for (int64_t j = 0; j < kStream; ++j)
          part[row * kKeys + j] = weights[row * kKeys + j] * factors_[j];
      kernels_.add(part, rows, read_as(), out + at, rows_, std::min(block_, E_ - at), E_, keys);
      for (int64_t j = 0; j < keys; ++j) rows[j] = static_cast<const char*>(rows[j]) + block_;
    }
  }

  // Whether the kernels read quantised elements, so that a scale is applied once per key and block.
  bool scaled_in_place() const { return in_place_ && job_.pool.scales; }
  int32_t read_as() const { return in_place_ ? job_.pool.dtype : KVG_FLOAT32; }

  // The scales of a block of `keys` keys, which begins `at` elements after their first heads.
  void load_factors(const KeyTile& tile, int kind, int64_t at, int64_t first, int64_t keys) {
    const float* scales = job_.pool.scales + at / block_;
    for (int64_t j = 0; j < keys; ++j) factors_[j] = scales[tile.groups[kind][first + j]];
  }

  // Points `rows` at `width` elements of each key: in the pool itself, or converted where the
  // kernels do not read its dtype or many query rows share the conversion.
  void read(const KeyTile& tile, int kind, int64_t head, int64_t width, int64_t first, int64_t keys,
            const void** rows) {
    const Pool& pool = job_.pool;
    const Dtype& type = dtype(pool.dtype);
    for (int64_t j = 0; j < keys; ++j) {
      const int64_t slot = tile.slots[kind][first + j] + head * D_;
      const char* from = pool.data + slot * static_cast<int64_t>(type.size);
      float* to = converted_ + j * width;
      rows[j] = in_place_ ? static_cast<const void*>(from) : to;
      if (in_place_) continue;
      type.to_float(from, to, static_cast<size_t>(width));
      if (pool.scales) dequantize(to, slot, width);
    }
  }

  void dequantize(float* x, int64_t slot, int64_t width) const {
    const float* scales = job_.pool.scales + slot / block_;
    for (int64_t begin = 0; begin < width; begin += block_)
      kernels_.scale(x + begin, *scales++, std::min(block_, width - begin));
  }

  void weigh(int64_t head, int64_t first, int64_t keys) {
    for (int64_t row = 0; row < rows_; ++row) {
      const Keys seen = keys_of(job_, tile_.row, position(tile_.begin + row / group_));
      const int64_t begin = std::clamp<int64_t>(seen.first - first, 0, keys);
      const int64_t end = std::clamp<int64_t>(seen.last - first, begin, keys);
      const int64_t state = state_of(head) + row;
      float* scores = scores_of(head) + row * kKeys;
      if (in_bfloat16_) kernels_.scale(scores + begin, scale(), end - begin);
      kernels_.weigh(scores, begin, end, keys, job_.softcap * kLog2e,
                     &softmax_[state], out_ + state * E_, E_);
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
  const int64_t block_;  // elements of a key that share a scale
  const bool in_bfloat16_, in_place_;
  // [heads, M, D], [heads, M, E], [heads, M, J], [J, max(D, E)] or, of blocks, [M, J]
  float *q_, *out_, *scores_, *converted_;
  float factors_[kStream] = {};
  Softmax* softmax_;                        // [heads, M]
};

// Joins the parts of a split tile, for one kv head.
void merge(const Attention& job, Partial& partial, const Tile& tile, int64_t head) {
  const Dtype& type = dtype(job.dtype);
  const int64_t group = job.heads / job.pool.kv_heads, rows = (tile.end - tile.begin) * group;
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t index = tile.partial + head * rows + row;
    float* out = partial.at(index) + 2;
    Softmax state{partial.at(index)[0], partial.at(index)[1]};
    for (int64_t part = 1; part < tile.parts; ++part) {
      const float* other = partial.at(index + part * rows * job.pool.kv_heads);
      kernels().join(&state, out, {other[0], other[1]}, other + 2, job.v_head_dim);
    }
    const int64_t query_head = head * group + row % group;
    kernels().finish(state, sink_of(job, query_head), out, job.v_head_dim);
    const int64_t token = job.rows.begin(tile.row) + tile.begin + row / group;
    const int64_t to = (token * job.heads + query_head) * job.v_head_dim;
    type.from_float(out, job.out + to * static_cast<int64_t>(type.size),
                    static_cast<size_t>(job.v_head_dim));
  }
}

}  // namespace

void attend(const Attention& job) {
  kernels();  // refuses here, not in a task
  if (job.heads == 0 || job.v_head_dim == 0) return;
  Plan p = plan(job);
  const size_t head_tasks = static_cast<size_t>(p.head_tasks);
  parallel_for(job.call, p.tiles.size() * head_tasks, [&](size_t task) {
    const int64_t first = static_cast<int64_t>(task % head_tasks) * p.heads_per_task;
    const int64_t last = std::min(job.pool.kv_heads, first + p.heads_per_task);
    Worker(job, p.partial, p.tiles[task / head_tasks], first, last).run();
  });
  const size_t heads = static_cast<size_t>(job.pool.kv_heads);
  parallel_for(job.call, p.split.size() * heads, [&](size_t task) {
    merge(job, p.partial, p.tiles[p.split[task / heads]], static_cast<int64_t>(task % heads));
  });
}

AttentionAttributes check_attributes(const Operands& in, int layer) {
  // Both attention ops have these six in this order, from `layer` on.
  static_assert(KVG_PAGED_ATTENTION_ATTR_V_HEAD_DIM - KVG_PAGED_ATTENTION_ATTR_LAYER == 5 &&
                KVG_UPDATE_AND_ATTEND_ATTR_V_HEAD_DIM - KVG_UPDATE_AND_ATTEND_ATTR_LAYER == 5);
  using ll = long long;
  const int at = layer - KVG_PAGED_ATTENTION_ATTR_LAYER;
  const char* op = in.op.name;
  const int64_t window = in.integer(at + KVG_PAGED_ATTENTION_ATTR_WINDOW);
  const double softcap = in.real(at + KVG_PAGED_ATTENTION_ATTR_SOFTCAP);
  const int64_t causal = in.integer(at + KVG_PAGED_ATTENTION_ATTR_CAUSAL);
  const int64_t given = in.integer(at + KVG_PAGED_ATTENTION_ATTR_V_HEAD_DIM);
  const int64_t head_dim = in.dims[KVG_DIM_HEAD_DIM];
  if (window < 0) refuse("%s: window: expected at least 0, got %lld", op, ll{window});
  if (!(softcap >= 0)) refuse("%s: softcap: expected at least 0, got %g", op, softcap);
  if (causal != 0 && causal != 1)
    refuse("%s: causal: expected 0 or 1, got %lld", op, ll{causal});
  if (given < 0 || given > head_dim)
    refuse("%s: v_head_dim: expected at most head_dim %lld, got %lld", op, ll{head_dim},
           ll{given});
  const int64_t v_head_dim = given ? given : head_dim;
  if (in.dims[KVG_DIM_V_HEAD_DIM] != v_head_dim)
    refuse("%s: dim v_head_dim: expected %lld of attribute v_head_dim, got %lld", op,
           ll{v_head_dim}, ll{in.dims[KVG_DIM_V_HEAD_DIM]});
  return {in.integer(layer), window, v_head_dim,
          static_cast<float>(in.real(at + KVG_PAGED_ATTENTION_ATTR_SCALE)),
          static_cast<float>(softcap), causal == 1};
}

void check_heads(const Operands& in) {
  using ll = long long;
  const int64_t heads = in.dims[KVG_DIM_NUM_HEADS], kv_heads = in.dims[KVG_DIM_NUM_KV_HEADS];
  if (kv_heads == 0 ? heads != 0 : heads % kv_heads != 0)
    refuse("%s: q: dim num_heads: expected a multiple of the %lld kv heads of kv_blocks, got %lld",
           in.op.name, ll{kv_heads}, ll{heads});
}

}  // namespace kvg
