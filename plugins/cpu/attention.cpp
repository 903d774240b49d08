#include "cpu/attention.h"

#include <algorithm>
#include <functional>
#include <queue>
#include <vector>

#include "cpu/attention_stream.h"
#include "cpu/attention_tile.h"
#include "cpu/kernels.h"
#include "cpu/parallel.h"

namespace kvg {
namespace {

constexpr int64_t kQueryRows = 128;      // target number of query rows (M) of a tile
constexpr int64_t kSegment = 512;        // keys of a segment, in contexts of up to kMost segments
constexpr int64_t kMost = 16;            // most segments of a context
constexpr int64_t kStateFloats = 32768;  // floats of Q and outputs of a task that stay in cache
constexpr size_t kEven = 4;              // tiles of each thread that keep all threads busy
constexpr double kParts = 1.15;          // time to read rows in parts, over that to read whole rows

struct Plan {
  std::vector<Tile> tiles;
  std::vector<size_t> split;  // index of the first part of each split tile
  int64_t heads_per_task, head_tasks;
  Partial partial;
};

// Number of keys of a segment for a query at a position. It must depend on nothing else.
int64_t segment_at(int64_t position) {
  int64_t segment = kSegment;
  while (position >= kMost * segment) segment *= 2;
  return segment;
}

// The time of threads that take tasks in order, if a task has `per` of a tile's heads.
double time_of(const std::vector<double>& work, int64_t per, int64_t heads, size_t threads) {
  std::priority_queue<double, std::vector<double>, std::greater<double>> busy(
      {}, std::vector<double>(threads));
  double last = 0;
  for (const double of_tile : work)
    for (int64_t head = 0; head < heads; head += per) {
      const auto share = static_cast<double>(std::min(per, heads - head));
      const double end = busy.top() + of_tile * share / static_cast<double>(heads);
      busy.pop(), busy.push(end);
      last = std::max(last, end);
    }
  return last;
}

// Heads of a task, `most` at most. They lie side by side: a task takes as many as it can, unless
// threads would wait longer for each other than reading parts of rows costs.
int64_t heads_of_task(const Attention& job, const std::vector<Tile>& tiles, int64_t most,
                      bool halves) {
  const size_t threads = parallelism(job.call);
  if (most == 1 || tiles.size() >= kEven * threads) return most;
  std::vector<double> work;
  double total = 0;
  for (const Tile& tile : tiles) {
    const Keys keys = keys_of_part(job, tile);
    work.push_back(static_cast<double>((keys.last - keys.first) * (tile.end - tile.begin)));
    total += work.back();
  }
  const double even = total / static_cast<double>(threads);  // no thread ever waits
  int64_t best = most;
  double least = time_of(work, most, job.pool.kv_heads, threads), cost = kParts;
  for (int64_t per = most; per > 1 && cost * even < least; cost *= kParts) {
    per = halves ? (per + 1) / 2 : 1;
    const double time = cost * time_of(work, per, job.pool.kv_heads, threads);
    if (time < least) best = per, least = time;
  }
  return best;
}

// Cuts rows into tiles; all queries of a tile have segments of one size. A token's result is the
// same, bit for bit, in every batch and chunk and on every number of threads.
Plan plan(const Attention& job) {
  Plan p;
  const int64_t group = job.heads / job.pool.kv_heads;
  const int64_t tokens = std::max<int64_t>(1, kQueryRows / group);
  int64_t partials = 0, longest = 0;
  for (int64_t row = 0; row < job.rows.count; ++row) {
    const int64_t fresh = job.rows.fresh(row);
    const int64_t cached = job.rows.cached[row];
    for (int64_t begin = 0, end; begin < fresh; begin = end) {
      const int64_t last_key = job.causal ? cached + begin : job.rows.length(row) - 1;
      const int64_t segment = segment_at(last_key);
      end = std::min(fresh, begin + tokens);
      if (job.causal) end = std::min(end, kMost * segment - cached);
      const int64_t first = keys_of(job, row, cached + begin).first;
      const int64_t last = keys_of(job, row, cached + end - 1).last;
      const bool splits = fresh <= tokens && last - first >= 2 * kSegment;
      const int64_t parts = splits ? (last - 1) / segment - first / segment + 1 : 1;
      if (parts > 1) p.split.push_back(p.tiles.size());
      for (int64_t part = 0; part < parts; ++part)
        p.tiles.push_back({row, begin, end, part, parts,
                           partials + part * (end - begin) * job.heads, segment});
      if (parts > 1) partials += parts * (end - begin) * job.heads;
      longest = std::max(longest, end - begin);
    }
  }
  p.partial.stride = 2 + job.v_head_dim;
  p.partial.floats.resize(static_cast<size_t>(partials * p.partial.stride));
  const int64_t state = longest * group * (job.pool.head_dim + job.v_head_dim);
  const int64_t fit = std::max<int64_t>(1, kStateFloats / std::max<int64_t>(1, state));
  // Without streams, half rows took 1.1 to 1.3 times as long as single heads (Zen 4, float32).
  const bool halves = longest * group <= kFewRows && has_streams(job.pool);
  p.heads_per_task = heads_of_task(job, p.tiles, std::min(fit, job.pool.kv_heads), halves);
  p.head_tasks = ceildiv(job.pool.kv_heads, p.heads_per_task);
  return p;
}

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
    attend_tile(job, p.partial, p.tiles[task / head_tasks], first, last);
  });
  const size_t heads = static_cast<size_t>(job.pool.kv_heads);
  parallel_for(job.call, p.split.size() * heads, [&](size_t task) {
    merge(job, p.partial, p.tiles[p.split[task / heads]], static_cast<int64_t>(task % heads));
  });
}

AttentionAttributes check_attributes(const Operands& in, int layer) {
  // Both attention ops have these seven attributes in this order, from `layer` on.
  static_assert(KVG_PAGED_ATTENTION_ATTR_CHUNKED - KVG_PAGED_ATTENTION_ATTR_LAYER == 6 &&
                KVG_UPDATE_AND_ATTEND_ATTR_CHUNKED - KVG_UPDATE_AND_ATTEND_ATTR_LAYER == 6);
  using ll = long long;
  const int at = layer - KVG_PAGED_ATTENTION_ATTR_LAYER;
  const char* op = in.op.name;
  const int64_t window = in.integer(at + KVG_PAGED_ATTENTION_ATTR_WINDOW);
  const int64_t causal = in.integer(at + KVG_PAGED_ATTENTION_ATTR_CAUSAL);
  const int64_t chunked = in.integer(at + KVG_PAGED_ATTENTION_ATTR_CHUNKED);
  const int64_t given = in.integer(at + KVG_PAGED_ATTENTION_ATTR_V_HEAD_DIM);
  const int64_t head_dim = in.dims[KVG_DIM_HEAD_DIM];
  if (window < 0) refuse("%s: window: expected at least 0, got %lld", op, ll{window});
  const float scale = in.finite(at + KVG_PAGED_ATTENTION_ATTR_SCALE);
  const float softcap = in.at_least_0(at + KVG_PAGED_ATTENTION_ATTR_SOFTCAP);
  if (causal != 0 && causal != 1)
    refuse("%s: causal: expected 0 or 1, got %lld", op, ll{causal});
  if (chunked != 0 && chunked != 1)
    refuse("%s: chunked: expected 0 or 1, got %lld", op, ll{chunked});
  if (chunked && !window) refuse("%s: chunked: expected 0 without a window, got 1", op);
  if (given < 0 || given > head_dim)
    refuse("%s: v_head_dim: expected at most head_dim %lld, got %lld", op, ll{head_dim},
           ll{given});
  const int64_t v_head_dim = given ? given : head_dim;
  if (in.dims[KVG_DIM_V_HEAD_DIM] != v_head_dim)
    refuse("%s: dim v_head_dim: expected %lld of attribute v_head_dim, got %lld", op,
           ll{v_head_dim}, ll{in.dims[KVG_DIM_V_HEAD_DIM]});
  return {in.integer(layer), window, v_head_dim, scale, softcap, causal == 1, chunked == 1};
}

void check_heads(const Operands& in) {
  using ll = long long;
  const int64_t heads = in.dims[KVG_DIM_NUM_HEADS], kv_heads = in.dims[KVG_DIM_NUM_KV_HEADS];
  if (kv_heads == 0 ? heads != 0 : heads % kv_heads != 0)
    refuse("%s: q: dim num_heads: expected a multiple of the %lld kv heads of kv_blocks, got %lld",
           in.op.name, ll{kv_heads}, ll{heads});
}

}  // namespace kvg
