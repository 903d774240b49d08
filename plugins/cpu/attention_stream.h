// Attention of few query rows over K and V as they lie, at the rate of memory.
#pragma once

#include "cpu/attention_tile.h"

namespace kvg {

// As attend_tile; false, and nothing done, where this processor has no kernels for such rows and pool.
bool attend_stream(const Attention& job, Partial& partial, const Tile& tile, int64_t first_head,
                   int64_t last_head);

}  // namespace kvg
