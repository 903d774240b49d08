// Structs of launch.h, as their callers give them.
#pragma once

#include "common/base.h"

namespace kvg::cuda {

// Checks the first two fields of a struct, before any other field is read.
template <class Struct>
void check_frame(const char* what, const Struct* given) {
  if (!given) refuse(KVG_REFUSED, "%s: expected a struct, got a null pointer", what);
  if (given->abi_version != KVG_LAUNCH_ABI_VERSION)
    refuse(KVG_REFUSED, "%s: expected ABI version %d of this library, got %u from its caller", what,
           KVG_LAUNCH_ABI_VERSION, given->abi_version);
  if (given->struct_size < sizeof(Struct))
    refuse(KVG_REFUSED, "%s: expected a struct of at least %zu bytes, got %u", what, sizeof(Struct),
           given->struct_size);
}

}  // namespace kvg::cuda
