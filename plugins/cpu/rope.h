// Rotary embedding of one token's heads (RoFormer, section 3.4.2).
#pragma once

#include <cstdint>

#include "cpu/check.h"

namespace kvg {

struct Rope {
  const float* cos_sin;  // [positions, rotary]: cosines of the angles, then their sines; or nullptr
  int64_t rotary;
  bool interleaved;  // pairs 2i with 2i + 1; else i with i + rotary / 2

  explicit operator bool() const { return cos_sin; }
  // Rotates the first `rotary` elements of x in place.
  void apply(float* x, int64_t position) const;
};

// Refuses unless the table covers every position at which `rows` has a new token.
Rope check_rope(const Operands& in, int cos_sin, int64_t style, const Rows& rows);

}  // namespace kvg
