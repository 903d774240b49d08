#include "cuda/sha256.h"

#include <cstring>

namespace kvg::cuda {
namespace {

// First 32 fractional bits of the cube roots of the first 64 primes.
constexpr uint32_t kRounds[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2};

uint32_t rotated(uint32_t x, int by) { return x >> by | x << (32 - by); }

uint32_t big_endian(const uint8_t* p) {
  return uint32_t{p[0]} << 24 | uint32_t{p[1]} << 16 | uint32_t{p[2]} << 8 | p[3];
}

void mix(uint32_t (&state)[8], const uint8_t* block) {
  uint32_t w[64];
  for (int i = 0; i < 16; ++i) w[i] = big_endian(block + 4 * i);
  for (int i = 16; i < 64; ++i) {
    const uint32_t a = w[i - 15], b = w[i - 2];
    w[i] = w[i - 16] + (rotated(a, 7) ^ rotated(a, 18) ^ a >> 3) + w[i - 7] +
           (rotated(b, 17) ^ rotated(b, 19) ^ b >> 10);
  }
  uint32_t s[8];
  std::memcpy(s, state, sizeof s);
  for (int i = 0; i < 64; ++i) {
    const uint32_t e = s[4], a = s[0];
    const uint32_t one = s[7] + (rotated(e, 6) ^ rotated(e, 11) ^ rotated(e, 25)) +
                         ((e & s[5]) ^ (~e & s[6])) + kRounds[i] + w[i];
    const uint32_t two = (rotated(a, 2) ^ rotated(a, 13) ^ rotated(a, 22)) +
                         ((a & s[1]) ^ (a & s[2]) ^ (s[1] & s[2]));
    std::memmove(s + 1, s, 7 * sizeof *s);
    s[4] += one;
    s[0] = one + two;
  }
  for (int i = 0; i < 8; ++i) state[i] += s[i];
}

}  // namespace

Digest sha256(const void* data, size_t size) {
  uint32_t state[8] = {0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                       0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
  const auto* bytes = static_cast<const uint8_t*>(data);
  size_t left = size;
  for (; left >= 64; left -= 64, bytes += 64) mix(state, bytes);
  uint8_t tail[128] = {};  // the remaining bytes, a 1 bit, zeros, the length in bits
  if (left) std::memcpy(tail, bytes, left);
  tail[left] = 0x80;
  const size_t end = left < 56 ? 64 : 128;
  for (int i = 0; i < 8; ++i) tail[end - 1 - i] = static_cast<uint8_t>(uint64_t{size} * 8 >> 8 * i);
  for (size_t at = 0; at < end; at += 64) mix(state, tail + at);
  Digest digest;
  for (size_t i = 0; i < 32; ++i) digest[i] = static_cast<uint8_t>(state[i / 4] >> (24 - 8 * (i % 4)));
  return digest;
}

std::string shown(const Digest& digest) {
  std::string text;
  for (int i = 0; i < 8; ++i)
    for (int nibble : {digest[i] >> 4, digest[i] & 15}) text += "0123456789abcdef"[nibble];
  return text;
}

}  // namespace kvg::cuda
