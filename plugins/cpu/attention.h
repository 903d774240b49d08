// Attention of ragged rows over their pages, flash-style: keys stream by once, in tiles.
#pragma once

#include "cpu/check.h"
#include "cpu/rope.h"

namespace kvg {

struct Attention {
  const kvg_call& call;
  Pool pool;
  Rows rows;
  Rope rope;           // of Q
  const char* q;       // [T, N, D]
  char* out;           // [T, N, v_head_dim]
  const float* sinks;  // [N] or nullptr
  int32_t dtype;       // of q and out
  int64_t heads, v_head_dim;
  int64_t window;  // 0: none
  bool chunked;    // windows begin at multiples of their length
  float scale, softcap;  // softcap 0: none
  bool causal;
};

// The attributes that attention ops share, checked. `layer` is the number of the first of them.
struct AttentionAttributes {
  int64_t layer, window, v_head_dim;
  float scale, softcap;
  bool causal, chunked;

  // Positions before its row's first new token that an attention may look at; < 0: all.
  int64_t reach() const { return window ? window - 1 : -1; }
};
AttentionAttributes check_attributes(const Operands& in, int layer);

// Query heads that share a kv head must be equally many.
void check_heads(const Operands& in);

void attend(const Attention& job);

}  // namespace kvg
