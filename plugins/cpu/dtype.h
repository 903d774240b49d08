// Rows of every stored dtype to and from float32; rounding is to nearest, ties to even.
#pragma once

#include <cstddef>

#include "kvgraph/contract.h"

namespace kvg {

struct Dtype {
  size_t size;  // bytes of one element
  void (*to_float)(const void* from, float* to, size_t count);
  void (*from_float)(const float* from, void* to, size_t count);
};

const Dtype& dtype(int32_t code);

// Largest magnitude that a quantised element stores; 0 for dtypes that are stored as they are.
float quantized_max(int32_t code);

}  // namespace kvg
