// Attention of few query rows over K and V as they are stored, limited by memory bandwidth.
#pragma once

#include "cpu/attention_tile.h"

namespace kvg {

// Whether few query rows over such a pool have kernels on this processor.
bool has_streams(const Pool& pool);

// Does what attend_tile does, and returns true. Returns false, without any effect, if there
// are no kernels for these rows and this pool.
bool attend_stream(const Attention& job, Partial& partial, const Tile& tile, int64_t first_head,
                   int64_t last_head);

}  // namespace kvg
