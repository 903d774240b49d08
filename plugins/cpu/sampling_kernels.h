// Passes over a row of logits, for kernels.cpp.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cpu/vector.h"

namespace kvg::KVG_ISA {

// Lanes that a comparison found, as bits.
inline uint32_t lanes_of(Index found) {
#if defined(__AVX512F__)
  return _mm512_test_epi32_mask((__m512i)found, (__m512i)found);
#elif defined(__AVX2__)
  return static_cast<uint32_t>(_mm256_movemask_ps((__m256)found));
#else
  uint32_t lanes = 0;
  for (int i = 0; i < kLanes; ++i) lanes |= static_cast<uint32_t>(found[i] & 1) << i;
  return lanes;
#endif
}

inline int64_t argmax(const float* x, int64_t count) {
  constexpr int64_t kBlock = 64 * kLanes;
  float greatest = -kInfinity;
  int64_t best = 0, i = 0;
  for (; i + kBlock <= count; i += kBlock) {
    Vector tops[4];  // of every fourth vector: they do not wait for each other
    for (Vector& top : tops) top = Vector{} - kInfinity;
    for (int64_t v = 0; v < kBlock; v += 4 * kLanes)
      for (int n = 0; n < 4; ++n)
        tops[n] = larger(load(Float32{}, x + i + v + n * kLanes), tops[n]);
    const Vector joined = larger(larger(tops[0], tops[1]), larger(tops[2], tops[3]));
    const float top = reduce<larger>(joined, joined, joined, joined)[0];
    if (top > greatest) greatest = top, best = i;
  }
  const int64_t end = i;
  if (greatest > -kInfinity)
    while (x[best] != greatest) ++best;
  for (i = end; i < count; ++i)
    if (x[i] > greatest) greatest = x[i], best = i;
  return best;
}

inline void group_maxima(const float* x, int64_t count, float* maxima, int64_t groups) {
  std::fill_n(maxima, groups, -kInfinity);
  for (int64_t begin = 0; begin < count; begin += groups) {
    const int64_t width = count - begin < groups ? count - begin : groups;
    int64_t g = 0;
    for (; g + kLanes <= width; g += kLanes)
      save(maxima + g, larger(load(Float32{}, x + begin + g), load(Float32{}, maxima + g)));
    for (; g < width; ++g)
      if (x[begin + g] > maxima[g]) maxima[g] = x[begin + g];
  }
}

// Halves the range of all floats, in the order of their bits.
inline float reached_by(const float* x, int64_t count, int64_t most) {
  const auto number = [](int64_t place) {
    const uint32_t bits = place < 0 ? 0x7fffffffu ^ static_cast<uint32_t>(place)
                                    : static_cast<uint32_t>(place);
    return as<float>(bits);
  };
  int64_t low = -0x7f800001, high = 0x7f800001;  // -infinity, and beyond infinity
  while (high - low > 1) {
    const int64_t middle = low + (high - low) / 2;
    const float least = number(middle);
    Index reach = {};
    int64_t i = 0, found = 0;
    for (; i + kLanes <= count; i += kLanes) reach -= load(Float32{}, x + i) >= least;
    for (int lane = 0; lane < kLanes; ++lane) found += reach[lane];
    for (; i < count; ++i) found += x[i] >= least;
    if (found < most) {
      high = middle;
    } else {
      low = middle;
      if (found <= most + most / 8) break;
    }
  }
  return number(low);
}

inline int64_t at_least(const float* x, int64_t count, float least, int32_t* ids, int64_t room) {
  int64_t found = 0, i = 0;
  const auto take = [&](int64_t id) {
    if (found < room) ids[found] = static_cast<int32_t>(id);
    ++found;
  };
  for (; i + 4 * kLanes <= count; i += 4 * kLanes) {
    Index reach_4[4], any = {};
    for (int v = 0; v < 4; ++v) {
      reach_4[v] = load(Float32{}, x + i + v * kLanes) >= least;
      any |= reach_4[v];
    }
    if (!lanes_of(any)) continue;  // as most do
    for (int v = 0; v < 4; ++v)
      for (uint32_t lanes = lanes_of(reach_4[v]); lanes; lanes &= lanes - 1)
        take(i + v * kLanes + __builtin_ctz(lanes));
  }
  for (; i < count; ++i)
    if (x[i] >= least) take(i);
  return found;
}

inline double weight_sum(const float* x, int64_t count, float greatest, float temperature) {
  constexpr int64_t kBlock = 16 * kLanes;  // numbers whose sum in float32 loses little
  const float factor = 1.442695041f / temperature;
  const Vector least = Vector{} - kInfinity;
  double total = 0;
  int64_t i = 0;
  for (; i + kBlock <= count; i += kBlock) {
    Vector sum_4[4] = {};
    for (int64_t v = 0; v < kBlock; v += 4 * kLanes)
      for (int n = 0; n < 4; ++n) {
        const Vector logit = larger(load(Float32{}, x + i + v + n * kLanes), least);
        sum_4[n] += exp2_of_negative((logit - greatest) * factor);
      }
    total += static_cast<double>(sum(sum_4[0] + sum_4[1] + (sum_4[2] + sum_4[3])));
  }
  for (; i < count; ++i)
    if (x[i] >= -kInfinity)
      total += static_cast<double>(exp2_of_negative((x[i] - greatest) * factor));
  return total;
}

}  // namespace kvg::KVG_ISA
