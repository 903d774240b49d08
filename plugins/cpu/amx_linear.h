// Sums of up to 32 rows and two panels by AMX tiles, for linear_kernels.cpp.
//
// Sixteen lines of a panel are a tile of weights without any conversion: 16 columns of 32 bfloat16
// or 64 int8 inputs. Likewise, 64 bytes of each of 16 prepared rows are a tile of rows. Tiles 0 to
// 3 are accumulators (two tiles of rows by two panels), 4 and 5 hold rows, 6 and 7 weights.
#pragma once

#include "cpu/amx.h"
#include "cpu/linear.h"

namespace kvg::KVG_ISA {

constexpr int64_t kTileLines = 16, kTileHeight = 16, kTallest = 2 * kTileHeight;

// Configures the tiles for 1 to kTallest rows, except tiles that have no rows.
inline void shape_tiles(int64_t rows) {
  const int64_t upper = rows < kTileHeight ? rows : kTileHeight, lower = rows - upper;
  const int64_t heights[] = {upper, upper, lower, lower, upper, lower, kTileLines, kTileLines};
  TileConfig config;
  for (int t = 0; t < 8; ++t) {
    config.rows[t] = static_cast<uint8_t>(heights[t]);
    config.row_bytes[t] = heights[t] ? kLineBytes : 0;
  }
  KVG_TILE_CONFIG(&config);
}

#define KVG_TILE_DOT(sums, x, w)                              \
  do {                                                        \
    if constexpr (Bits == 16) KVG_TILE_DOT_BF16(sums, x, w);  \
    else KVG_TILE_DOT_U8S8(sums, x, w);                       \
  } while (0)

// Multiplies Down tiles of rows from `x` by Across panels; `out`: rows x Across x kColumns.
template <int Bits, int Down, int Across>
void sum_tiles(const char* x, int64_t stride, const char* w, int64_t panel_bytes, int64_t lines,
               char* out) {
  const char* below = x + kTileHeight * stride;
  KVG_TILE_ZERO(0);
  if constexpr (Across > 1) KVG_TILE_ZERO(1);
  if constexpr (Down > 1) KVG_TILE_ZERO(2);
  if constexpr (Down > 1 && Across > 1) KVG_TILE_ZERO(3);
  for (int64_t i = 0; i < lines; i += kTileLines) {
    KVG_TILE_LOAD(6, w, kLineBytes);
    KVG_TILE_LOAD(4, x, stride);
    KVG_TILE_DOT(0, 4, 6);
    if constexpr (Across > 1) KVG_TILE_LOAD(7, w + panel_bytes, kLineBytes);
    if constexpr (Across > 1) KVG_TILE_DOT(1, 4, 7);
    if constexpr (Down > 1) KVG_TILE_LOAD(5, below, stride);
    if constexpr (Down > 1) KVG_TILE_DOT(2, 5, 6);
    if constexpr (Down > 1 && Across > 1) KVG_TILE_DOT(3, 5, 7);
    w += kTileLines * kLineBytes, x += kLineBytes, below += kLineBytes;
  }
  constexpr int64_t kRowBytes = Across * kLineBytes;  // a panel's 16 sums are a line
  char* lower = out + kTileHeight * kRowBytes;
  KVG_TILE_STORE(0, out, kRowBytes);
  if constexpr (Across > 1) KVG_TILE_STORE(1, out + kLineBytes, kRowBytes);
  if constexpr (Down > 1) KVG_TILE_STORE(2, lower, kRowBytes);
  if constexpr (Down > 1 && Across > 1) KVG_TILE_STORE(3, lower + kLineBytes, kRowBytes);
}

#undef KVG_TILE_DOT

// Calls sum_tiles for `rows` rows, for which shape_tiles was called, and `panels` panels.
template <int Bits, class... Arguments>
void sum_tiles_of(int64_t rows, int64_t panels, Arguments... arguments) {
  const bool tall = rows > kTileHeight;
  if (panels == kPair)
    tall ? sum_tiles<Bits, 2, 2>(arguments...) : sum_tiles<Bits, 1, 2>(arguments...);
  else
    tall ? sum_tiles<Bits, 2, 1>(arguments...) : sum_tiles<Bits, 1, 1>(arguments...);
}

}  // namespace kvg::KVG_ISA
