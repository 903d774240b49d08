// Attention of a ragged batch over its pages, as in FlashAttention: keys are read once, in tiles.
#pragma once

#include "cpu/check.h"
#include "cpu/heads.h"

namespace kvg {

struct Attention {
  const kvg_call& call;
  Pool pool;
  Rows rows;
  HeadSteps steps;     // of Q
  const char* q;       // [T, N, D]
  char* out;           // [T, N, v_head_dim]
  const float* sinks;  // [N] or nullptr
  int32_t dtype;       // kvg_dtype of q and out
  int64_t heads, v_head_dim;
  int64_t window;  // 0: none
  bool chunked;    // windows begin at multiples of their length
  float scale, softcap;  // softcap 0: none
  bool causal;
};

// The attributes that attention ops share, checked.
struct AttentionAttributes {
  int64_t layer, window, v_head_dim;
  float scale, softcap;
  bool causal, chunked;

  // Number of positions before a row's first new token that attention may read; < 0: all.
  int64_t reach() const { return window ? window - 1 : -1; }
};
// `layer`: index of attribute layer, the first of them.
AttentionAttributes check_attributes(const Operands& in, int layer);

// Refuses unless all kv heads serve the same number of query heads.
void check_heads(const Operands& in);

void attend(const Attention& job);

}  // namespace kvg
