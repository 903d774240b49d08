// Edits of a row of logits, in the order of vLLM's sampler: mask, banned tokens, bias, penalties.
// Temperature and the choice of tokens follow, in sampling.cpp.
#include "cpu/sampling_edits.h"

#include <algorithm>
#include <cmath>
#include <string>

#include "cpu/check.h"
#include "cpu/kernels.h"

namespace kvg {

namespace {

constexpr int32_t kInPrompt = 1 << 30;  // a bit of a count, whose lower bits count the output
constexpr int64_t kBits = 32;           // bits of a word of the mask

template <class T>
void check_data(const char* field, const T* pointer, int64_t count, size_t row) {
  const bool is_aligned = reinterpret_cast<uintptr_t>(pointer) % alignof(T) == 0;
  if (count <= 0 || (pointer && is_aligned)) return;
  const std::string where = "row " + std::to_string(row) + ": " + field;
  require_data("sample", where.c_str(), pointer, static_cast<size_t>(count));
}

void check_ids(const char* field, const int32_t* ids, int64_t count, size_t row, int64_t vocab) {
  if (count < 0)
    refuse("sample: row %zu: num_%s: expected >= 0, got %lld", row, field,
           static_cast<long long>(count));
  check_data(field, ids, count, row);
  uint32_t greatest = 0;  // a negative id is greater than all others
  for (int64_t i = 0; i < count; ++i) greatest = std::max(greatest, static_cast<uint32_t>(ids[i]));
  if (greatest >= static_cast<uint64_t>(vocab))
    refuse("sample: row %zu: %s: expected token ids in [0, %lld), got %d", row, field,
           static_cast<long long>(vocab), static_cast<int32_t>(greatest));
}

void check_number(const char* field, bool fits, const char* expected, double got, size_t row) {
  if (!fits) refuse("sample: row %zu: %s: expected %s, got %g", row, field, expected, got);
}

}  // namespace

void check(const kvg_edits& edits, size_t row, int64_t vocab) {
  const int64_t words = (vocab + kBits - 1) / kBits;
  if (edits.mask && edits.num_words < words)
    refuse("sample: row %zu: num_words: expected at least %lld, got %lld", row,
           static_cast<long long>(words), static_cast<long long>(edits.num_words));
  if (edits.mask) check_data("mask", edits.mask, words, row);
  check_ids("banned", edits.banned, edits.num_banned, row, vocab);
  check_ids("biased", edits.biased, edits.num_biased, row, vocab);
  check_data("bias", edits.bias, edits.num_biased, row);
  check_ids("tokens", edits.tokens, edits.num_tokens, row, vocab);
  if (edits.num_prompt < 0 || edits.num_prompt > edits.num_tokens)
    refuse("sample: row %zu: num_prompt: expected 0 to %lld, got %lld", row,
           static_cast<long long>(edits.num_tokens), static_cast<long long>(edits.num_prompt));
  check_number("repetition", edits.repetition > 0 && std::isfinite(edits.repetition),
               "> 0 and finite", edits.repetition, row);
  check_number("presence", std::isfinite(edits.presence), "finite", edits.presence, row);
  check_number("frequency", std::isfinite(edits.frequency), "finite", edits.frequency, row);
}

const float* Editor::edit(const float* logits, int64_t vocab, const kvg_edits& edits) {
  row_.resize(static_cast<size_t>(vocab));
  if (edits.mask) {
    copy_allowed(logits, vocab, edits.mask);
  } else {
    std::copy(logits, logits + vocab, row_.begin());
  }
  for (int64_t i = 0; i < edits.num_banned; ++i)
    row_[static_cast<size_t>(edits.banned[i])] = -kInfinity;
  for (int64_t i = 0; i < edits.num_biased; ++i)
    row_[static_cast<size_t>(edits.biased[i])] += edits.bias[i];
  if (edits.num_tokens > 0) punish(edits);
  return row_.data();
}

// Most words of a mask are nearly empty or nearly full: only the rarer kind of bits is visited.
void Editor::copy_allowed(const float* logits, int64_t vocab, const uint32_t* mask) {
  for (int64_t begin = 0; begin < vocab; begin += kBits) {
    const int64_t many = std::min(kBits, vocab - begin);
    const uint32_t all = many == kBits ? ~0u : (1u << many) - 1;
    const uint32_t allowed = mask[begin / kBits] & all;
    const float* from = logits + begin;
    float* to = row_.data() + begin;
    if (__builtin_popcount(allowed) < kBits / 2) {
      std::fill_n(to, many, -kInfinity);
      for (uint32_t bits = allowed; bits; bits &= bits - 1)
        to[__builtin_ctz(bits)] = from[__builtin_ctz(bits)];
    } else {
      std::copy_n(from, many, to);
      for (uint32_t bits = ~allowed & all; bits; bits &= bits - 1)
        to[__builtin_ctz(bits)] = -kInfinity;
    }
  }
}

// Counts tokens again in each step, so that an interrupted step has nothing to undo; 4,096 tokens
// take a few microseconds. Penalties are computed in float64 and rounded once.
void Editor::punish(const kvg_edits& edits) {
  counts_.resize(std::max(counts_.size(), row_.size()));
  seen_.reserve(static_cast<size_t>(edits.num_tokens));  // nothing below allocates
  seen_.clear();
  const auto see = [&](int64_t begin, int64_t end, int32_t step) {
    for (int64_t i = begin; i < end; ++i) {
      int32_t& count = counts_[static_cast<size_t>(edits.tokens[i])];
      if (count == 0) seen_.push_back(edits.tokens[i]);
      count = step == kInPrompt ? kInPrompt : count + step;
    }
  };
  if (edits.repetition != 1) see(0, edits.num_prompt, kInPrompt);
  see(edits.num_prompt, edits.num_tokens, 1);
  for (const int32_t token : seen_) {
    int32_t& count = counts_[static_cast<size_t>(token)];
    const int32_t generated = count & (kInPrompt - 1);
    count = 0;
    double logit = static_cast<double>(row_[static_cast<size_t>(token)]);
    logit = logit > 0 ? logit / edits.repetition : logit * edits.repetition;
    if (generated > 0) logit -= edits.frequency * generated + edits.presence;
    row_[static_cast<size_t>(token)] = static_cast<float>(logit);
  }
}

}  // namespace kvg
