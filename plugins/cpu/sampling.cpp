// Logits -> tokens, for the sampler of the engine.
//
// A row's head, its likeliest tokens, decides a draw alone if it surely gives the same token as the
// whole row. Only the head is ranked; the rest only adds to the total weight, which is known with a
// relative error of kTotalError.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <numeric>
#include <vector>

#include "cpu/check.h"
#include "cpu/kernels.h"
#include "cpu/parallel.h"
#include "cpu/sampling_edits.h"
#include "kvgraph/abi.h"

namespace {

constexpr int64_t kHeads[] = {128, 1024};  // sizes of the head that are tried before all tokens
constexpr int64_t kFewestGroups = 256, kWidths = 16;  // widths of groups are multiples of kWidths
constexpr double kTotalError = 1e-5;  // twice the relative error of weigh_groups
// Bounds of the temperature for weigh_groups: it and its reciprocal are finite in float32.
constexpr double kColdest = 1e-30, kWarmest = std::numeric_limits<float>::max();

// The state of drawing a token from a row. Each thread has one, and keeps its memory.
class Row {
 public:
  // Draws a token; -1 if no logit is above -infinity.
  int32_t draw(const float* logits, int64_t vocab, const kvg_draw& draw);
  size_t ranked() const { return keys_.size(); }
  // Scores `asked.token` in found[0], then the `asked.most` likeliest tokens.
  void score(const float* logits, int64_t vocab, const kvg_scored& asked, kvg_logprob* found);

 private:
  bool find_head(int64_t most);
  void order();
  int32_t draw_any();
  void take_all();
  int32_t draw_from_ids();
  int32_t draw_from_head();
  int32_t draw_from_all();
  int32_t draw_kept(int64_t kept, double mass);
  double weight(int64_t rank);
  int64_t kept(double bound, double* mass);
  int64_t rank(double target, int64_t most);
  int64_t place(int32_t token) const;

  int64_t count() const { return static_cast<int64_t>(ids_.size()); }
  int32_t id(int64_t rank) const { return ids_[static_cast<size_t>(rank)]; }

  const float* logits_;
  int64_t vocab_, top_k_;
  kvg_draw draw_;
  double total_;              // weight of the row; < 0: not known yet
  std::vector<int32_t> ids_;  // some tokens, likeliest first
  std::vector<double> weights_;  // weights of the first `weighed_` of them, those asked for so far
  int64_t weighed_;
  std::vector<float> maxima_;
  std::vector<uint64_t> keys_, sorted_;
  kvg::Editor editor_;
};

int32_t Row::draw(const float* logits, int64_t vocab, const kvg_draw& draw) {
  logits_ = draw.edits ? editor_.edit(logits, vocab, *draw.edits) : logits;
  vocab_ = vocab, draw_ = draw, total_ = -1;
  keys_.clear();
  const int32_t token = draw.temperature == 0
                            ? static_cast<int32_t>(kvg::kernels().argmax(logits_, vocab))
                            : draw_any();
  return logits_[token] > -kvg::kInfinity ? token : -1;
}

int32_t Row::draw_any() {
  top_k_ = draw_.top_k > 0 ? std::min(draw_.top_k, vocab_) : vocab_;
  for (const int64_t most : kHeads) {
    if (most < top_k_ && top_k_ < vocab_) continue;
    if (!find_head(std::min(most, top_k_))) break;
    const int32_t token = draw_from_ids();
    if (token >= 0) return token;
  }
  take_all();
  return draw_from_ids();
}

void Row::take_all() {
  ids_.resize(static_cast<size_t>(vocab_));
  std::iota(ids_.begin(), ids_.end(), 0);
}

// Draws a token; -1 if ids_ do not decide it.
int32_t Row::draw_from_ids() {
  order();
  if (!std::isfinite(logits_[id(0)])) return id(0);
  if (draw_.min_p > 0) {
    const int64_t most = std::min(count(), top_k_);
    int64_t likely = 0;
    while (likely < most && weight(likely) >= draw_.min_p) ++likely;
    if (likely == count() && likely < top_k_) return -1;
    ids_.resize(static_cast<size_t>(likely));
    return draw_from_all();
  }
  return count() < top_k_ ? draw_from_head() : draw_from_all();
}

// Sets ids_ to the `most` likeliest tokens and some more; returns false if it would be many more. A
// threshold that `most` maxima of groups reach, each a different token, the `most` likeliest reach.
bool Row::find_head(int64_t most) {
  const kvg::Kernels& kernels = kvg::kernels();
  const int64_t wanted = std::max(4 * most, kFewestGroups);
  const int64_t width = (vocab_ / wanted / kWidths + 1) * kWidths;
  const int64_t groups = kvg::ceildiv(vocab_, width), room = 4 * wanted;
  if (2 * groups < 3 * most) return false;
  maxima_.resize(static_cast<size_t>(groups));
  if (top_k_ == vocab_ && total_ < 0 && draw_.min_p == 0) {
    const auto warmth = static_cast<float>(std::clamp(draw_.temperature, kColdest, kWarmest));
    total_ = kernels.weigh_groups(logits_, vocab_, width, maxima_.data(), warmth);
  } else {
    kernels.group_maxima(logits_, vocab_, width, maxima_.data());
  }
  ids_.resize(static_cast<size_t>(room + width + kWidths));
  const auto find = [&](const float* among, int64_t count) {
    const float least = kernels.reached_by(among, count, most);
    return kernels.at_least(logits_, vocab_, width, maxima_.data(), least, ids_.data(), room);
  };
  int64_t found = find(maxima_.data(), groups);
  if (found > room) found = find(logits_, vocab_);  // the likely ones are neighbours
  if (found < most || found > room) return false;   // NaN, or many are equal
  ids_.resize(static_cast<size_t>(found));
  return true;
}

// Ranks ids, which ascend: a stable radix sort by keys that descend as logits ascend.
void Row::order() {
  keys_.resize(ids_.size());
  sorted_.resize(ids_.size());
  weights_.resize(ids_.size());
  weighed_ = 0;
  uint32_t counts[4][256] = {};
  for (size_t i = 0; i < ids_.size(); ++i) {
    const float logit = logits_[ids_[i]];
    const float x = logit >= -kvg::kInfinity ? logit + 0.0f : -kvg::kInfinity;  // no -0.0, no NaN
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    const uint32_t key = bits >> 31 ? bits : ~bits & 0x7fffffffu;
    keys_[i] = uint64_t{key} << 32 | static_cast<uint32_t>(ids_[i]);
    for (int byte = 0; byte < 4; ++byte) ++counts[byte][key >> 8 * byte & 255];
  }
  for (int byte = 0; byte < 4; ++byte) {
    if (counts[byte][keys_[0] >> (32 + 8 * byte) & 255] == keys_.size()) continue;  // all are equal
    uint32_t at[256];
    std::exclusive_scan(counts[byte], counts[byte] + 256, at, 0u);
    for (const uint64_t key : keys_) sorted_[at[key >> (32 + 8 * byte) & 255]++] = key;
    keys_.swap(sorted_);
  }
  std::transform(keys_.begin(), keys_.end(), ids_.begin(),
                 [](uint64_t key) { return static_cast<int32_t>(key); });
}

// Draws a token of a row with tokens that are not ranked; -1 if these, or the error of `total_`,
// may decide.
int32_t Row::draw_from_head() {
  const double least = total_ * (1 - kTotalError), most = total_ * (1 + kTotalError);
  if (draw_.top_p == 1) {
    const int64_t drawn = rank(draw_.uniform * least, count());
    return drawn < count() && drawn == rank(draw_.uniform * most, count()) ? id(drawn) : -1;
  }
  double mass;
  const int64_t many = kept(draw_.top_p * most, &mass);
  if (many == count() || many != kept(draw_.top_p * least, &mass)) return -1;
  return draw_kept(many, mass);
}

// Draws a token of a row in which all tokens that may be drawn are ranked.
int32_t Row::draw_from_all() {
  ids_.resize(static_cast<size_t>(std::min(count(), top_k_)));
  double total = 0, mass;
  for (int64_t r = 0; r < count(); ++r) total += weight(r);
  const int64_t many = kept(draw_.top_p * total, &mass);
  return draw_kept(many, mass);
}

// Draws one of the `kept` likeliest tokens, whose weights have the sum `mass`.
int32_t Row::draw_kept(int64_t kept, double mass) {
  return id(std::min(rank(draw_.uniform * mass, kept), kept - 1));
}

// exp((logit - greatest) / temperature). Callers must ask for ranks in order.
double Row::weight(int64_t rank) {
  double& weight = weights_[static_cast<size_t>(rank)];
  if (rank < weighed_) return weight;
  ++weighed_;
  const float logit = logits_[id(rank)];
  const double below = static_cast<double>(logit) - static_cast<double>(logits_[id(0)]);
  return weight = logit > -kvg::kInfinity ? std::exp(below / draw_.temperature) : 0;
}

// Number of tokens, likeliest first, until the sum of their weights reaches `bound`; at least one,
// none of weight 0. `mass`: that sum.
int64_t Row::kept(double bound, double* mass) {
  int64_t many = 0;
  for (*mass = 0; many < count() && (many == 0 || *mass < bound) && weight(many) > 0; ++many)
    *mass += weight(many);
  return many;
}

// Rank of the first of `most` tokens at which the sum of weights exceeds `target`; `most` if none.
int64_t Row::rank(double target, int64_t most) {
  int64_t r = 0;
  for (double reached = 0; r < most && (reached += weight(r)) <= target;) ++r;
  return r;
}

void Row::score(const float* logits, int64_t vocab, const kvg_scored& asked, kvg_logprob* found) {
  logits_ = logits, vocab_ = vocab, top_k_ = vocab, total_ = -1;
  draw_ = {}, draw_.temperature = 1;
  if (!find_head(std::max(asked.most, 1))) take_all();
  order();
  if (total_ < 0)
    for (total_ = 0; weighed_ < count();) total_ += weight(weighed_);
  const float top = logits_[id(0)];
  const auto logprob = [&](int32_t token) {
    const float logit = logits_[token];
    if (!(logit > -kvg::kInfinity)) return -static_cast<double>(kvg::kInfinity);
    if (std::isinf(top)) return logit == top ? 0 : -static_cast<double>(kvg::kInfinity);
    return static_cast<double>(logit) - static_cast<double>(top) - std::log(total_);
  };
  found[0] = {asked.token, static_cast<int32_t>(place(asked.token)) + 1, logprob(asked.token)};
  for (int32_t r = 0; r < asked.most; ++r)
    found[r + 1] = r < count() ? kvg_logprob{id(r), r + 1, logprob(id(r))} : kvg_logprob{-1, 0, 0};
}

// Number of tokens that come before this one in the order of the row.
int64_t Row::place(int32_t token) const {
  const auto number = [](float x) { return x >= -kvg::kInfinity ? x : -kvg::kInfinity; };
  const float logit = number(logits_[token]);
  int64_t before = 0;
  for (int64_t i = 0; i < vocab_; ++i) before += logits_[i] > logit;
  for (int64_t i = 0; i < token; ++i) before += number(logits_[i]) == logit;
  return before;
}

void check_vocab(const char* name, int64_t vocab) {
  if (vocab < 1 || vocab > INT32_MAX)
    kvg::refuse("%s: expected a vocabulary of 1 to 2^31 - 1 tokens, got %lld", name,
                static_cast<long long>(vocab));
}

void check(const kvg_scored& asked, size_t at, size_t rows, int64_t vocab) {
  const auto expect = [at](int64_t got, int64_t least, int64_t end, const char* field) {
    if (got < least || got >= end)
      kvg::refuse("logprobs: %zu: %s: expected %lld to %lld, got %lld", at, field,
                  static_cast<long long>(least), static_cast<long long>(end - 1),
                  static_cast<long long>(got));
  };
  expect(asked.row, 0, static_cast<int64_t>(rows), "row");
  expect(asked.token, 0, vocab, "token");
  expect(asked.most, 0, KVG_MOST_LOGPROBS + 1, "most");
}

void check(const kvg_draw& draw, size_t row, int64_t vocab) {
  const auto expect = [row](bool fits, const char* field, const char* expected, double got) {
    if (!fits) kvg::refuse("sample: row %zu: %s: expected %s, got %g", row, field, expected, got);
  };
  expect(draw.temperature >= 0 && std::isfinite(draw.temperature), "temperature",
         ">= 0 and finite", draw.temperature);
  expect(draw.top_p > 0 && draw.top_p <= 1, "top_p", "in (0, 1]", draw.top_p);
  expect(draw.uniform >= 0 && draw.uniform < 1, "uniform", "in [0, 1)", draw.uniform);
  expect(draw.top_k >= 0, "top_k", ">= 0", static_cast<double>(draw.top_k));
  expect(draw.min_p >= 0 && draw.min_p <= 1, "min_p", "in [0, 1]", draw.min_p);
  if (!draw.edits) return;
  kvg::require_data("sample", "edits", draw.edits, 1);
  kvg::check(*draw.edits, row, vocab);
}

}  // namespace

extern "C" int32_t kvg_cpu_sample(const float* logits, const kvg_draw* draws, size_t rows,
                                  int64_t vocab, kvg_drawn* drawn, char* message,
                                  size_t message_size) {
  return kvg::entry(message, message_size, [&] {
    kvg::kernels();  // refuses here, not in a task
    check_vocab("sample", vocab);
    kvg::require_data("sample", "logits", logits, rows);
    kvg::require_data("sample", "draws", draws, rows);
    kvg::require_data("sample", "drawn", drawn, rows);
    for (size_t row = 0; row < rows; ++row) check(draws[row], row, vocab);
    const kvg_call call = {};
    kvg::parallel_for(call, rows, [&](size_t row) {
      static thread_local Row x;
      const int32_t token = x.draw(logits + static_cast<int64_t>(row) * vocab, vocab, draws[row]);
      drawn[row] = {token, static_cast<int32_t>(x.ranked())};
    });
  });
}

extern "C" int32_t kvg_cpu_logprobs(const float* logits, size_t rows, int64_t vocab,
                                    const kvg_scored* asked, size_t count, kvg_logprob* found,
                                    char* message, size_t message_size) {
  return kvg::entry(message, message_size, [&] {
    kvg::kernels();  // refuses here, not in a task
    check_vocab("logprobs", vocab);
    kvg::require_data("logprobs", "logits", logits, count);
    kvg::require_data("logprobs", "asked", asked, count);
    kvg::require_data("logprobs", "found", found, count);
    for (size_t i = 0; i < count; ++i) check(asked[i], i, rows, vocab);
    const kvg_call call = {};
    kvg::parallel_for(call, count, [&](size_t i) {
      static thread_local Row x;
      x.score(logits + asked[i].row * vocab, vocab, asked[i], found + i * (KVG_MOST_LOGPROBS + 1));
    });
  });
}
