// float32 vectors in the compiler's own extension, and the functions that attention needs of them.
// Written for GCC and Clang on any processor; a width that the machine lacks is split by them.
#pragma once

#include <cstdint>
#include <cstring>

namespace kvg {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#else
constexpr int kLanes = 8;
#endif

using Vector = float __attribute__((vector_size(kLanes * sizeof(float))));

inline Vector load(const float* from) {
  Vector v;
  std::memcpy(&v, from, sizeof v);
  return v;
}

inline void save(float* to, Vector v) { std::memcpy(to, &v, sizeof v); }

inline float sum(Vector v) {
  float lanes[kLanes];
  std::memcpy(lanes, &v, sizeof v);
  for (int width = kLanes / 2; width > 0; width /= 2)
    for (int i = 0; i < width; ++i) lanes[i] += lanes[i + width];
  return lanes[0];
}

inline float bits_as_float(uint32_t u) {
  float x;
  std::memcpy(&x, &u, sizeof x);
  return x;
}

inline uint32_t float_as_bits(float x) {
  uint32_t u;
  std::memcpy(&u, &x, sizeof u);
  return u;
}

// 2^x for x <= 0, to 2e-7 relative; below 2^-126: 0. NaN stays NaN. The polynomial is a minimax fit
// of 2^f on [-1/2, 1/2] (relative error 1.9e-9).
inline float exp2_of_negative(float x) {
  constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it leaves the nearest integer
  const float clipped = x < -126.0f ? -126.0f : x;
  const float shifted = clipped + kRound;
  const float f = clipped - (shifted - kRound);
  float p = 1.534581160e-4f;
  p = p * f + 1.339993122e-3f;
  p = p * f + 9.618488959e-3f;
  p = p * f + 5.550328777e-2f;
  p = p * f + 2.402264689e-1f;
  p = p * f + 6.931472057e-1f;
  p = p * f + 1.000000001f;
  const float power = bits_as_float((float_as_bits(shifted) - float_as_bits(kRound) + 127u) << 23);
  return x < -126.0f ? 0.0f : p * power;
}

// tanh to 3e-7 relative. Near 0 a minimax fit of (tanh(x)/x - 1)/x^2 on [0, 0.625], else by 2^x.
inline float tanh_of(float x) {
  const float a = bits_as_float(float_as_bits(x) & 0x7fffffffu), z = x * x;
  float p = 2.298670577e-3f;
  p = p * z - 8.349717959e-3f;
  p = p * z + 2.177088286e-2f;
  p = p * z - 5.395953108e-2f;
  p = p * z + 1.333330485e-1f;
  p = p * z - 3.333333318e-1f;
  const float near = x + x * (z * p);
  const float e = exp2_of_negative(-2.885390082f * a);  // exp(-2 |x|)
  const float far = (1.0f - e) / (1.0f + e);
  const float signed_far = bits_as_float(float_as_bits(far) | (float_as_bits(x) & 0x80000000u));
  return a < 0.625f ? near : signed_far;
}

}  // namespace kvg
