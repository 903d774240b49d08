// Rounds weights in groups to nibbles, with the step of least squared error; used by compiles.
//
// This file is built without fused multiply-add, and sums have a fixed order: every processor gives
// the same bytes.
#include <algorithm>
#include <cstdint>
#include <limits>

#include "cpu/check.h"
#include "kvgraph/abi.h"

namespace {

constexpr int kLanes = 8;  // groups at a time, each in one lane
constexpr int64_t kMostWidth = 256, kMostTries = 256;
constexpr float kLeast = -8, kMost = 7;
constexpr float kNoFraction = 1.5f * (1 << 23);  // added to a small float: rounds it, ties to even
using Floats = float __attribute__((vector_size(4 * kLanes)));
using Ints = int32_t __attribute__((vector_size(4 * kLanes)));

// x / step as whole numbers in [kLeast, kMost].
Floats rounded(Floats x, Floats step) {
  x /= step;
  x = x < kLeast ? Floats{} + kLeast : x;
  x = x > kMost ? Floats{} + kMost : x;
  return x + kNoFraction - kNoFraction;
}

Floats squared_error(Floats x, Floats step, Floats factor) {
  const Floats off = (rounded(x, step) * step - x) * factor;
  return off * off;
}

// A power of two, 1 at most, that brings `largest` below 4: sums of squared errors are finite, and
// are scaled without rounding.
Floats factor_of(Floats largest) {
  constexpr int32_t kOne = 127 << 23, kMostExponent = 253 << 23;  // bits of a float
  Ints exponent = (Ints)largest & 0x7f800000;
  exponent = exponent > kOne ? exponent : Ints{} + kOne;
  exponent = exponent < kMostExponent ? exponent : Ints{} + kMostExponent;
  return (Floats)(2 * kOne - exponent);
}

// Rounds `count` groups, each in one of the first lanes.
void round_groups(const float* weights, const float* steps, int count, int64_t width, int64_t tries,
                  int8_t* nibbles, uint8_t* chosen) {
  Floats inputs[kMostWidth], largest = {};
  for (int64_t i = 0; i < width; ++i) {
    inputs[i] = Floats{};
    for (int lane = 0; lane < count; ++lane) inputs[i][lane] = weights[lane * width + i];
    const Floats size = inputs[i] < 0 ? -inputs[i] : inputs[i];
    largest = size > largest ? size : largest;
  }
  const Floats factor = factor_of(largest);
  const auto step_of = [=](int64_t t) {
    Floats step = {};
    for (int lane = 0; lane < count; ++lane) step[lane] = steps[lane * tries + t];
    return step == 0 ? Floats{} + 1 : step;
  };
  Floats least = Floats{} + std::numeric_limits<float>::infinity(), kept = step_of(0);
  Ints best = {};
  for (int64_t t = 0; t < tries; ++t) {
    const Floats step = step_of(t);
    Floats even = {}, odd = {};
    for (int64_t i = 0; i < width; i += 2) {
      even += squared_error(inputs[i], step, factor);
      odd += squared_error(inputs[i + 1], step, factor);
    }
    const Floats error = even + odd;
    const Ints better = error < least;
    least = better ? error : least;
    kept = better ? step : kept;
    best = better ? Ints{} + static_cast<int32_t>(t) : best;
  }
  for (int lane = 0; lane < count; ++lane) chosen[lane] = static_cast<uint8_t>(best[lane]);
  for (int64_t i = 0; i < width; ++i) {
    const Ints found = __builtin_convertvector(rounded(inputs[i], kept), Ints);
    for (int lane = 0; lane < count; ++lane)
      nibbles[lane * width + i] = static_cast<int8_t>(found[lane]);
  }
}

}  // namespace

extern "C" int32_t kvg_cpu_round_groups(const float* weights, const float* steps, size_t groups,
                                        int64_t width, int64_t tries, int8_t* nibbles,
                                        uint8_t* chosen, char* message, size_t message_size) {
  return kvg::entry(message, message_size, [&] {
    if (width < 2 || width > kMostWidth || width % 2)
      kvg::refuse("round_groups: width: expected an even number of 2 to %lld, got %lld",
                  static_cast<long long>(kMostWidth), static_cast<long long>(width));
    if (tries < 1 || tries > kMostTries)
      kvg::refuse("round_groups: tries: expected 1 to %lld, got %lld",
                  static_cast<long long>(kMostTries), static_cast<long long>(tries));
    kvg::require_data("round_groups", "weights", weights, groups);
    kvg::require_data("round_groups", "steps", steps, groups);
    kvg::require_data("round_groups", "nibbles", nibbles, groups);
    kvg::require_data("round_groups", "chosen", chosen, groups);
    for (size_t g = 0; g < groups; g += kLanes) {
      const auto count = static_cast<int>(std::min<size_t>(kLanes, groups - g));
      const auto group = static_cast<int64_t>(g);
      if (count == kLanes)  // a constant, so that loops over lanes are unrolled
        round_groups(weights + group * width, steps + group * tries, kLanes, width, tries,
                     nibbles + group * width, chosen + g);
      else
        round_groups(weights + group * width, steps + group * tries, count, width, tries,
                     nibbles + group * width, chosen + g);
    }
  });
}
