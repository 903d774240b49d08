// Edits of a row of logits before a token is drawn from it.
#pragma once

#include <cstdint>
#include <vector>

#include "kvgraph/abi.h"

namespace kvg {

// Throws a Refusal that names the row and the field if a value is out of range.
void check(const kvg_edits& edits, size_t row, int64_t vocab);

// Applies edits. Each thread has one, and keeps its memory.
class Editor {
 public:
  // The edited row, [vocab]; it lasts until the next call. `logits` are not changed.
  const float* edit(const float* logits, int64_t vocab, const kvg_edits& edits);

 private:
  void copy_allowed(const float* logits, int64_t vocab, const uint32_t* mask);
  void punish(const kvg_edits& edits);

  std::vector<float> row_;
  std::vector<int32_t> counts_;  // indexed by token; all 0 between calls
  std::vector<int32_t> seen_;    // tokens whose count is not 0
};

}  // namespace kvg
