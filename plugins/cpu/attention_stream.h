// Attention of few query rows over K and V as they lie, at the rate of memory.
#pragma once

#include "cpu/attention_tile.h"

namespace kvg {

// Whether this processor has kernels for so few rows over such a pool.
bool streams(const Attention& job, int64_t rows);

// attend_tile, where streams().
void attend_stream(const Attention& job, Partial& partial, const Tile& tile, int64_t first_head,
                   int64_t last_head);

}  // namespace kvg
