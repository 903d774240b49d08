// Passes over a row of logits, for kernels.cpp.
#pragma once

#include <cstdint>

#include "cpu/vector.h"

namespace kvg::KVG_ISA {

inline bool any(Index lanes) {
  int32_t joined = 0;
  for (int i = 0; i < kLanes; ++i) joined |= lanes[i];
  return joined;
}

inline bool group_maxima(const float* x, int64_t count, float* maxima, int64_t groups) {
  std::memcpy(maxima, x, static_cast<size_t>(groups) * sizeof(float));
  Index odd = {};  // where a number was NaN
  bool lone = false;
  for (int64_t begin = 0; begin < count; begin += groups) {
    const int64_t width = count - begin < groups ? count - begin : groups;
    int64_t g = 0;
    for (; g + kLanes <= width; g += kLanes) {
      const Vector v = load(Float32{}, x + begin + g);
      odd |= v != v;
      save(maxima + g, larger(v, load(Float32{}, maxima + g)));
    }
    for (; g < width; ++g) {
      const float v = x[begin + g];
      lone |= v != v;
      maxima[g] = v > maxima[g] ? v : maxima[g];
    }
  }
  return !lone && !any(odd);
}

inline int64_t at_least(const float* x, int64_t count, float least, int32_t* ids, int64_t room) {
  int64_t found = 0, i = 0;
  const auto take = [&](int64_t id) {
    if (found < room) ids[found] = static_cast<int32_t>(id);
    ++found;
  };
  for (; i + 4 * kLanes <= count; i += 4 * kLanes) {  // most of them hold none
    Index reach = {};
    for (int v = 0; v < 4; ++v) reach |= load(Float32{}, x + i + v * kLanes) >= least;
    if (!any(reach)) continue;
    for (int64_t id = i; id < i + 4 * kLanes; ++id)
      if (x[id] >= least) take(id);
  }
  for (; i < count; ++i)
    if (x[i] >= least) take(i);
  return found;
}

inline double weight_sum(const float* x, int64_t count, float greatest, float temperature) {
  constexpr int64_t kShort = 16;  // vectors whose sum in float32 loses little
  const float factor = 1.442695041f / temperature;
  double total = 0;
  int64_t i = 0;
  while (i + kLanes <= count) {
    Vector sums = {};
    for (int64_t n = 0; n < kShort && i + kLanes <= count; ++n, i += kLanes)
      sums += exp2_of_negative((load(Float32{}, x + i) - greatest) * factor);
    total += static_cast<double>(sum(sums));
  }
  for (; i < count; ++i) total += static_cast<double>(exp2_of_negative((x[i] - greatest) * factor));
  return total;
}

}  // namespace kvg::KVG_ISA
