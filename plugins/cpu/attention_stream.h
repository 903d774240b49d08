// Attention of few query rows over K and V as they are stored, limited by memory bandwidth.
#pragma once

#include "cpu/attention_tile.h"

namespace kvg {

// Does what attend_tile does, and returns true. Returns false, without any effect, if this
// processor has no kernels for such rows and pool.
bool attend_stream(const Attention& job, Partial& partial, const Tile& tile, int64_t first_head,
                   int64_t last_head);

}  // namespace kvg
