// Writes the new tokens of one layer into their pages.
#pragma once

#include "cpu/check.h"
#include "cpu/heads.h"

namespace kvg {

struct Store {
  const kvg_call& call;
  Pool pool;
  Rows rows;
  HeadSteps steps;    // of K
  const char *k, *v;  // [T, K, D], [T, K, v_head_dim]
  int32_t dtype;      // kvg_dtype of both
  int64_t v_head_dim;
};

// Touches only the slots of new tokens; returns when all of them are written.
void store(const Store& job);

}  // namespace kvg
