// The tile instructions of AMX as loops, after the operation sections of Intel's instruction set
// reference. Where a processor would fault, the process ends with a message.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "cpu/amx.h"

namespace kvg::emulated_amx {

constexpr int kTiles = 8, kRows = 16, kRowBytes = 64;

struct Tile {
  int rows, row_bytes;  // 0: not configured
  unsigned char data[kRows][kRowBytes];
};

inline thread_local Tile tiles[kTiles] = {};

inline void expect(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "emulated AMX: expected %s\n", what);
  std::abort();
}

inline Tile& configured(int index) {
  expect(index >= 0 && index < kTiles, "a tile 0 to 7");
  expect(tiles[index].rows > 0, "a tile that was configured with rows");
  return tiles[index];
}

inline void release() { std::memset(tiles, 0, sizeof tiles); }

inline void configure(const TileConfig* config) {
  expect(config->palette == 1, "palette 1");
  expect(config->start_row == 0, "a first row of 0, as no tile is half done");
  for (unsigned char byte : config->reserved) expect(byte == 0, "zeros in reserved bytes");
  release();
  for (int t = 0; t < 16; ++t) {
    const int rows = config->rows[t], bytes = config->row_bytes[t];
    expect(rows <= kRows && bytes <= kRowBytes, "at most 16 rows of 64 bytes");
    expect((rows == 0) == (bytes == 0), "rows and bytes of a row, or neither");
    expect(t < kTiles || rows == 0, "zeros beyond the last tile");
    if (t < kTiles) tiles[t].rows = rows, tiles[t].row_bytes = bytes;
  }
}

inline void zero(int index) {
  Tile& tile = configured(index);
  std::memset(tile.data, 0, sizeof tile.data);
}

inline void load(int index, const void* from, int64_t stride) {
  zero(index);  // clears rows and columns beyond the configured ones too
  Tile& tile = configured(index);
  const auto* row = static_cast<const unsigned char*>(from);
  for (int m = 0; m < tile.rows; ++m) std::memcpy(tile.data[m], row + m * stride, tile.row_bytes);
}

inline void store(int index, void* to, int64_t stride) {
  const Tile& tile = configured(index);
  auto* row = static_cast<unsigned char*>(to);
  for (int m = 0; m < tile.rows; ++m) std::memcpy(row + m * stride, tile.data[m], tile.row_bytes);
}

template <class T>
T read(const Tile& tile, int row, int index) {
  T value;
  std::memcpy(&value, tile.data[row] + index * sizeof value, sizeof value);
  return value;
}

// Checks the three tiles of a product: sums are M x N, x is M x K and w is K x N words of 4 bytes.
inline void check_product(int sums, int x, int w) {
  expect(sums != x && sums != w && x != w, "three different tiles");
  const Tile &c = configured(sums), &a = configured(x), &b = configured(w);
  expect(a.rows == c.rows, "as many rows as the sums have");
  expect(b.row_bytes == c.row_bytes, "as many columns as the sums have");
  expect(a.row_bytes == 4 * b.rows, "a line of weights for each word of a row");
}

template <class T>
void write(Tile& tile, int row, int index, T value) {
  std::memcpy(tile.data[row] + index * sizeof value, &value, sizeof value);
}

inline float without_denormals(float x) {
  return std::fabs(x) < 1.17549435e-38f ? std::copysign(0.0f, x) : x;
}

// Even and odd k have separate sums, which are added at the end.
inline void dot_bf16(int sums, int x, int w) {
  check_product(sums, x, w);
  Tile& c = tiles[sums];
  const Tile &a = tiles[x], &b = tiles[w];
  const auto element = [](const Tile& tile, int row, int index) {
    const uint32_t bits = uint32_t{read<uint16_t>(tile, row, index)} << 16;
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return without_denormals(value);
  };
  for (int m = 0; m < c.rows; ++m)
    for (int n = 0; n < c.row_bytes / 4; ++n) {
      float parts[2] = {};
      for (int k = 0; k < b.rows; ++k)
        for (int i = 0; i < 2; ++i)
          parts[i] = without_denormals(
              std::fma(element(a, m, 2 * k + i), element(b, k, 2 * n + i), parts[i]));
      const float part = without_denormals(parts[0] + parts[1]);
      const float before = without_denormals(read<float>(c, m, n));
      write(c, m, n, without_denormals(before + part));
    }
}

inline void dot_u8s8(int sums, int x, int w) {
  check_product(sums, x, w);
  Tile& c = tiles[sums];
  const Tile &a = tiles[x], &b = tiles[w];
  for (int m = 0; m < c.rows; ++m)
    for (int n = 0; n < c.row_bytes / 4; ++n) {
      auto sum = read<uint32_t>(c, m, n);  // unsigned: overflow wraps
      for (int k = 0; k < b.rows; ++k)
        for (int i = 0; i < 4; ++i)
          sum += static_cast<uint32_t>(read<uint8_t>(a, m, 4 * k + i) *
                                       read<int8_t>(b, k, 4 * n + i));
      write(c, m, n, sum);
    }
}

}  // namespace kvg::emulated_amx
