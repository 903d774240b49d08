// Converts one element of every stored dtype to and from float32; rounds to nearest, ties to even.
// Compiled once per instruction set (kernels.cpp). Branch-free, so that loops over it vectorise.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

namespace kvg::KVG_ISA {

inline uint32_t bits_of(float x) {
  uint32_t u;
  std::memcpy(&u, &x, sizeof u);
  return u;
}

inline float float_of(uint32_t u) {
  float x;
  std::memcpy(&x, &u, sizeof x);
  return x;
}

constexpr uint32_t kFloatInf = 0x7f800000u, kFloatNaN = 0x7fc00000u;

inline float power_of_two(int exponent) {
  return float_of(static_cast<uint32_t>(exponent + 127) << 23);
}

// A float of Mantissa stored mantissa bits and exponent bias Bias, in a Word. HasInf: the largest
// exponent holds infinities and NaN (float16); otherwise only the largest magnitude is NaN, and
// there is no infinity (float8_e4m3fn).
template <class W, int Mantissa, int Bias, bool HasInf>
struct Small {
  using Word = W;
  static constexpr int kShift = 23 - Mantissa;
  static constexpr uint32_t kSign = 1u << (8 * sizeof(Word) - 1);
  static constexpr uint32_t kMagnitude = kSign - 1;
  // First magnitude that no finite number has.
  static constexpr uint32_t kSpecial = HasInf ? kMagnitude - ((1u << Mantissa) - 1) : kMagnitude;

  static float decode(Word stored) {
    const uint32_t magnitude = stored & kMagnitude;
    const uint32_t normal = (magnitude << kShift) + (static_cast<uint32_t>(127 - Bias) << 23);
    const float tiny =
        static_cast<float>(static_cast<int32_t>(magnitude)) * power_of_two(1 - Bias - Mantissa);
    uint32_t u = magnitude < (1u << Mantissa) ? bits_of(tiny) : normal;
    u = magnitude >= kSpecial ? (HasInf ? kFloatInf | (magnitude << kShift) : kFloatNaN) : u;
    return float_of(u | (static_cast<uint32_t>(stored & kSign) << (32 - 8 * sizeof(Word))));
  }

  static Word encode(float x) {
    const uint32_t u = bits_of(x), magnitude = u & 0x7fffffffu;
    // Adding a number whose last bit has the weight of the result's last bit rounds in hardware.
    const float round = power_of_two(1 - Bias - Mantissa + 23);
    const uint32_t tiny = bits_of(float_of(magnitude) + round) - bits_of(round);
    const uint32_t rebiased = magnitude - (static_cast<uint32_t>(127 - Bias) << 23);
    const uint32_t odd = (rebiased >> kShift) & 1u;
    const uint32_t normal = (rebiased + (1u << (kShift - 1)) - 1 + odd) >> kShift;
    uint32_t out = magnitude < bits_of(power_of_two(1 - Bias)) ? tiny : normal;
    out = out > kSpecial || magnitude >= kFloatInf ? kSpecial : out;
    out = HasInf && magnitude > kFloatInf ? kSpecial | (1u << (Mantissa - 1)) : out;
    return static_cast<Word>(out | ((u >> 31) * kSign));
  }
};

using Float16 = Small<uint16_t, 10, 15, true>;
using Float8 = Small<uint8_t, 3, 7, false>;

struct Float32 {
  using Word = float;
  static float decode(float x) { return x; }
  static float encode(float x) { return x; }
};

struct BFloat16 {
  using Word = uint16_t;
  static float decode(uint16_t x) { return float_of(static_cast<uint32_t>(x) << 16); }
  static uint16_t encode(float x) {
    const uint32_t u = bits_of(x);
    const uint32_t rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
    const uint32_t nan = (u >> 16) | 0x40u;
    return static_cast<uint16_t>((u & 0x7fffffffu) > kFloatInf ? nan : rounded);
  }
};

struct Int8 {
  using Word = int8_t;
  static float decode(int8_t x) { return static_cast<float>(static_cast<int32_t>(x)); }
  static int8_t encode(float x) {  // a NaN is stored as 0: its scale is NaN
    const float bounded = x > -128.0f ? (x < 127.0f ? x : 127.0f) : (x == x ? -128.0f : 0.0f);
    return static_cast<int8_t>(static_cast<int32_t>(std::nearbyintf(bounded)));
  }
};

}  // namespace kvg::KVG_ISA
