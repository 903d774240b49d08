// AMX: eight tiles of up to 16 rows of 64 bytes, which each thread configures for itself.
//
// Its results are verified, its speed is not: it has run on an emulated processor only (Bochs 3.0,
// Sapphire Rapids, Linux 6.1; Bochs was changed to have extended feature disable and the right
// signs of TDPBUSD's second operand), never on hardware. The numbers of tiles are literals, because
// the compiler's intrinsics require it. KVG_EMULATE_AMX replaces the instructions by loops, which
// tests run on other processors.
#pragma once

#include <cstdint>

namespace kvg {

// Whether this processor has AMX for int8 and bfloat16, and the system lets this process use it.
// Requests that permission, which makes the signal frames of the process larger from then on.
bool amx_runs();

struct alignas(64) TileConfig {  // as the configuring instruction reads it
  uint8_t palette = 1;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
};
static_assert(sizeof(TileConfig) == 64, "a line");

}  // namespace kvg

// KVG_TILE_DOT_BF16(sums, x, w): float32 sums += bfloat16 rows of x times lines of w.
// KVG_TILE_DOT_U8S8(sums, x, w): int32 sums += uint8 rows of x times int8 lines of w.
#if defined(KVG_EMULATE_AMX)

#include "cpu/amx_emulation.h"
#define KVG_TILE_CONFIG(config) ::kvg::emulated_amx::configure(config)
#define KVG_TILE_RELEASE() ::kvg::emulated_amx::release()
#define KVG_TILE_ZERO(tile) ::kvg::emulated_amx::zero(tile)
#define KVG_TILE_LOAD(tile, from, stride) ::kvg::emulated_amx::load(tile, from, stride)
#define KVG_TILE_STORE(tile, to, stride) ::kvg::emulated_amx::store(tile, to, stride)
#define KVG_TILE_DOT_BF16(sums, x, w) ::kvg::emulated_amx::dot_bf16(sums, x, w)
#define KVG_TILE_DOT_U8S8(sums, x, w) ::kvg::emulated_amx::dot_u8s8(sums, x, w)

#elif defined(KVG_AMX)

#include <immintrin.h>

// The intrinsic does not tell GCC which memory it reads: the barrier completes earlier writes.
#define KVG_TILE_CONFIG(config)                      \
  do {                                               \
    __asm__ volatile("" : : "r"(config) : "memory"); \
    _tile_loadconfig(config);                        \
  } while (0)
#define KVG_TILE_RELEASE() _tile_release()
#define KVG_TILE_ZERO(tile) _tile_zero(tile)
#define KVG_TILE_LOAD(tile, from, stride) _tile_loadd(tile, from, stride)
#define KVG_TILE_STORE(tile, to, stride) _tile_stored(tile, to, stride)
#define KVG_TILE_DOT_BF16(sums, x, w) _tile_dpbf16ps(sums, x, w)
#define KVG_TILE_DOT_U8S8(sums, x, w) _tile_dpbusd(sums, x, w)

#endif
