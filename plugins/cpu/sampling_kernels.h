// Passes over a row of logits, for kernels.cpp.
#pragma once

#include <cmath>
#include <cstdint>

#include "cpu/vector.h"

namespace kvg::KVG_ISA {

// Bit mask of the lanes for which a comparison is true.
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
    Vector tops[4];  // maxima of every fourth vector each, which do not wait for each other
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

inline float largest(const float* x, int64_t count) {
  float top = -kInfinity;
  for (int64_t i = 0; i < count; ++i)
    if (x[i] > top) top = x[i];
  return top;
}

constexpr int64_t kAhead = 2048;  // numbers between the one read and the one prefetched

// Writes the maxima. Calls done(begin, count, greatest) for four groups at a time, then for the
// rest.
template <class Done>
void find_maxima(const float* x, int64_t count, int64_t width, float* maxima, Done&& done) {
  int64_t begin = 0;
  for (; begin + 4 * width <= count; begin += 4 * width, maxima += 4) {
    Vector tops[4];
    for (Vector& top : tops) top = Vector{} - kInfinity;
    for (int64_t i = 0; i < width; i += kLanes)
      for (int g = 0; g < 4; ++g) {
        const float* from = x + begin + g * width + i;
        __builtin_prefetch(from + kAhead);  // may be past the end
        tops[g] = larger(load(Float32{}, from), tops[g]);
      }
    const Vector joined = reduce<larger>(tops[0], tops[1], tops[2], tops[3]);
    std::memcpy(maxima, &joined, 4 * sizeof(float));
    done(begin, 4 * width, largest(maxima, 4));
  }
  const int64_t rest = begin;
  int64_t groups = 0;
  for (; begin < count; begin += width)
    maxima[groups++] = largest(x + begin, count - begin < width ? count - begin : width);
  done(rest, count - rest, largest(maxima, groups));
}

inline void group_maxima(const float* x, int64_t count, int64_t width, float* maxima) {
  find_maxima(x, count, width, maxima, [](int64_t, int64_t, float) {});
}

// Bisects the range of all floats, in the order of their bits.
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

// Writes first + lane for each lane of `found` and returns their number. The rest of kLanes
// elements may be overwritten.
inline int64_t append(Index found, int32_t first, int32_t* to) {
  uint32_t lanes = lanes_of(found);
  const int64_t many = __builtin_popcount(lanes);
#if defined(__AVX512F__)
  const auto numbers = (__m512i)(lane_numbers() + first);
  _mm512_storeu_si512(to, _mm512_maskz_compress_epi32(static_cast<__mmask16>(lanes), numbers));
#else
  for (; lanes; lanes &= lanes - 1) *to++ = first + __builtin_ctz(lanes);
#endif
  return many;
}

inline int64_t at_least(const float* x, int64_t count, int64_t width, const float* maxima,
                        float least, int32_t* ids, int64_t room) {
  int64_t found = 0;
  const auto take = [&](int64_t i, int64_t end) {
    for (; i + kLanes <= end; i += kLanes)
      found += append(load(Float32{}, x + i) >= least, static_cast<int32_t>(i), ids + found);
    for (; i < end; ++i)
      if (x[i] >= least) ids[found++] = static_cast<int32_t>(i);
  };
  const int64_t groups = count / width;  // whole groups
  int64_t g = 0;
  for (; g + kLanes <= groups; g += kLanes)
    for (uint32_t lanes = lanes_of(load(Float32{}, maxima + g) >= least); lanes; lanes &= lanes - 1) {
      const int64_t begin = (g + __builtin_ctz(lanes)) * width;
      take(begin, begin + width);
      if (found > room) return found;
    }
  for (; g < groups; ++g) {
    if (maxima[g] >= least) take(g * width, (g + 1) * width);
    if (found > room) return found;
  }
  take(groups * width, count);
  return found;
}

// 2^x for x <= 127, to 2.6e-6 relative, but about 2^-126 for x < -126 and for NaN: 2^31 of these do
// not change a sum that has a 1. The polynomial is a minimax fit of 2^f on [-1/2, 1/2].
inline Vector weight_of(Vector x) {
  const auto [shifted, f] = split(larger(x, Vector{} - 126.0f));
  Vector p = f * 9.570101909e-3f + 5.591786032e-2f;
  p = p * f + 2.402474483e-1f;
  p = p * f + 6.931218147e-1f;
  p = p * f + 9.999992614e-1f;
  return as<Vector>(as<Words>(p) + (as<Words>(shifted) << 23));
}

// Weights are relative to `from`. It rises only when a weight would exceed 2^kMost, so that no sum
// overflows.
inline double weigh_groups(const float* x, int64_t count, int64_t width, float* maxima,
                           float temperature) {
  constexpr float kMost = 60;
  const float factor = 1.442695041f / temperature;
  float from = -kInfinity, greatest = -kInfinity;
  double total = 0;
  const auto against = [&](float now) {
    return std::exp2((static_cast<double>(from) - static_cast<double>(now)) * factor);
  };
  find_maxima(x, count, width, maxima, [&](int64_t begin, int64_t many, float top) {
    if (top == -kInfinity) return;  // all weights are 0
    if ((top - from) * factor > kMost) total *= against(top), from = top;
    if (top > greatest) greatest = top;
    const int64_t end = begin + many;
    Vector sum_4[4] = {};
    for (; begin + 4 * kLanes <= end; begin += 4 * kLanes)
      for (int n = 0; n < 4; ++n)
        sum_4[n] += weight_of((load(Float32{}, x + begin + n * kLanes) - from) * factor);
    total += static_cast<double>(sum(sum_4[0] + sum_4[1] + (sum_4[2] + sum_4[3])));
    for (; begin < end; ++begin)
      total += static_cast<double>(weight_of(Vector{} + (x[begin] - from) * factor)[0]);
  });
  return total * against(greatest);
}

}  // namespace kvg::KVG_ISA
