// Joins gate and up of a gated layer (linear.h), for linear_kernels.cpp. NaN stays NaN.
#pragma once

#include <cmath>

#include "cpu/linear.h"
#include "cpu/vector.h"

namespace kvg::KVG_ISA {

inline float sigmoid(float x) {
  const float power = exp2_of_negative(-1.442695041f * (x < 0 ? -x : x));
  return (x < 0 ? power : 1.0f) / (1.0f + power);
}

// Sets gate to activation(gate) * up, limited and offset by the Gate, in kColumns columns.
inline void join(const Gate& by, float* gate, const float* up) {
  const float most = by.limit, alpha = by.alpha;
  const auto at_most = [&](float x) { return x > most ? most : x; };
  const auto other = [&](float x) { return (x < -most ? -most : at_most(x)) + by.up_offset; };
  if (by.activation == kSilu) {
#pragma omp simd
    for (int c = 0; c < kColumns; ++c) {
      const float x = at_most(gate[c]);
      gate[c] = x * sigmoid(alpha * x) * other(up[c]);
    }
  } else if (by.activation == kGelu) {
    for (int c = 0; c < kColumns; ++c) {
      const float x = at_most(gate[c]);
      gate[c] = 0.5f * x * (1.0f + std::erf(0.7071067812f * x)) * other(up[c]);
    }
  } else {  // x (1 + tanh(z)) / 2 = x sigmoid(2 z)
#pragma omp simd
    for (int c = 0; c < kColumns; ++c) {
      const float x = at_most(gate[c]);
      gate[c] = x * sigmoid(1.595769122f * (x + 0.044715f * x * x * x)) * other(up[c]);
    }
  }
}

}  // namespace kvg::KVG_ISA
