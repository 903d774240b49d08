// What a head of q or k becomes before it is attended or stored.
#pragma once

#include <cstdint>
#include <vector>

#include "cpu/check.h"

namespace kvg {

// RMSNorm over the elements of a head (Zhang and Sennrich, 2019).
struct HeadNorm {
  std::vector<float> weight;  // [head_dim], its offset included; empty: no norm
  float epsilon = 0;

  explicit operator bool() const { return !weight.empty(); }
  void apply(float* x) const;  // in place
};

// Rotary embedding (RoFormer, section 3.4.2).
struct Rope {
  const float* cos_sin;  // [positions, rotary]: cosines of the angles, then their sines; or nullptr
  int64_t rotary;
  bool interleaved;  // pairs 2i with 2i + 1; else i with i + rotary / 2

  explicit operator bool() const { return cos_sin; }
  // Rotates the first `rotary` elements of x in place.
  void apply(float* x, int64_t position) const;
};

// The norm of a head, and then its rotation.
struct HeadSteps {
  HeadNorm norm;
  Rope rope = {};

  explicit operator bool() const { return norm || rope; }
  void apply(float* x, int64_t position) const {
    if (norm) norm.apply(x);
    if (rope) rope.apply(x, position);
  }
};

// Refuses unless the table covers every position at which `rows` has a new token.
Rope check_rope(const Operands& in, int cos_sin, int64_t style, const Rows& rows);

// The norm with the weight of operand `norm`; none if it is left out.
HeadNorm head_norm(const Operands& in, int norm, float epsilon, float offset);

}  // namespace kvg
