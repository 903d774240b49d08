#include "cpu/attention_task.h"

#include <cstring>

namespace kvg {
namespace {

constexpr float kLog2e = 1.442695041f;

}  // namespace

AttentionTask::AttentionTask(const Attention& job, Partial& partial, const Tile& tile,
                             int64_t first_head, int64_t last_head)
    : job_(job),
      first_head_(first_head),
      last_head_(last_head),
      group_(job.heads / job.pool.kv_heads),
      rows_((tile.end - tile.begin) * group_),
      D_(job.pool.head_dim),
      E_(job.v_head_dim),
      size_(static_cast<int64_t>(dtype(job.pool.dtype).size)),
      row_size_(D_ * size_),
      block_(job.pool.scales ? D_ / job.pool.scales_per_head : D_),
      partial_(partial),
      tile_(tile),
      scale_(job.softcap ? job.scale / job.softcap : job.scale * kLog2e),
      softcap_(job.softcap * kLog2e) {}

Line* AttentionTask::make_room(int64_t lines) {
  const int64_t state = heads() * rows_;
  static thread_local std::vector<Line> room;
  static thread_local std::vector<Softmax> softmax;
  const auto needed = static_cast<size_t>(lines + lines_of(state * (2 * E_ + kKeys)));
  if (room.size() < needed) room.resize(needed);
  softmax.resize(static_cast<size_t>(2 * state));
  scores_ = room[static_cast<size_t>(lines)].floats;
  out_ = scores_ + state * kKeys, joined_out_ = out_ + state * E_;
  softmax_ = softmax.data(), joined_ = softmax_ + state;
  begin_segment();
  return room.data();
}

void AttentionTask::begin_segment() {
  const int64_t state = heads() * rows_;
  std::fill(softmax_, softmax_ + state, Softmax{-kInfinity, 0});
  std::fill(out_, out_ + state * E_, 0.0f);
}

void AttentionTask::end_segment() {
  const int64_t state = heads() * rows_;
  if (has_joined_)
    for (int64_t i = 0; i < state; ++i)
      kernels_.join(joined_ + i, joined_out_ + i * E_, softmax_[i], out_ + i * E_, E_);
  else
    std::swap(softmax_, joined_), std::swap(out_, joined_out_);
  has_joined_ = true;
}

void AttentionTask::find(int64_t first, int64_t end, KeyTile& tile) const {
  const Pool& pool = job_.pool;
  tile.first = first;
  tile.keys = std::clamp<int64_t>(end - first, 0, kKeys);
  int64_t offset = first % job_.rows.page_size;
  for (int64_t j = 0, count; j < tile.keys; j += count, offset = 0) {
    const int64_t page = job_.rows.page(tile_.row, first + j);
    count = std::min(tile.keys - j, job_.rows.page_size - offset);
    for (int kind : {0, 1}) {
      const int64_t slot = pool.at(page, offset, kind);
      const char* row = pool.data + slot * size_;
      for (int64_t i = 0; i < count; ++i, row += pool.token_stride * size_)
        tile.rows[kind][j + i] = row;
      if (!pool.scales) continue;
      const float* scales = pool.scales + slot / block_;
      for (int64_t i = 0; i < count; ++i, scales += pool.kv_heads * pool.scales_per_head)
        tile.scales[kind][j + i] = scales;
    }
  }
  for (int64_t j = tile.keys; tile.keys && j < kKeys; ++j)
    for (int kind : {0, 1}) {
      tile.rows[kind][j] = tile.rows[kind][tile.keys - 1];
      if (pool.scales) tile.scales[kind][j] = tile.scales[kind][tile.keys - 1];
    }
}

void AttentionTask::weigh(int64_t head, const KeyTile& tile) {
  for (int64_t row = 0; row < rows_; row += group_) {  // the rows of one token
    const Keys seen = keys_of(job_, tile_.row, position(tile_.begin + row / group_));
    const int64_t begin = std::clamp<int64_t>(seen.first - tile.first, 0, tile.keys);
    const int64_t end = std::clamp<int64_t>(seen.last - tile.first, begin, tile.keys);
    const int64_t state = state_of(head) + row;
    kernels_.weigh(scores_of(head) + row * kKeys, group_, begin, end, scale_, softcap_,
                   softmax_ + state, out_ + state * E_, E_);
  }
}

void AttentionTask::leave() {
  if (has_joined_) {
    end_segment();
    std::swap(softmax_, joined_), std::swap(out_, joined_out_);
  }
  for (int64_t head = first_head_; head < last_head_; ++head)
    tile_.parts > 1 ? save_partial(head) : finish(head);
}

void AttentionTask::finish(int64_t head) {
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

void AttentionTask::save_partial(int64_t head) {
  for (int64_t row = 0; row < rows_; ++row) {
    const int64_t state = state_of(head) + row;
    float* to = partial_.at(tile_.partial + head * rows_ + row);
    to[0] = softmax_[state].top, to[1] = softmax_[state].sum;
    std::memcpy(to + 2, out_ + state * E_, static_cast<size_t>(E_) * sizeof(float));
  }
}

float sink_of(const Attention& job, int64_t query_head) {
  return job.sinks ? job.sinks[query_head] * kLog2e : -kInfinity;
}

}  // namespace kvg
