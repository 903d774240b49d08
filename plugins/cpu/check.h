// Checks of everything that a kernel relies on, made before it writes anything.
#pragma once

#include <cstdint>

#include "common/base.h"

namespace kvg {

// Refuses a null pointer to `count` numbers or records, unless `count` is 0, and an address that is
// no multiple of `alignment`.
void require_data(const char* op, const char* field, const void* pointer, size_t count,
                  size_t alignment);

template <class T>
void require_data(const char* op, const char* field, const T* pointer, size_t count) {
  require_data(op, field, pointer, count, alignof(T));
}

// A call whose operands fit the op's table: each dim has one extent, each type variable one dtype,
// and each given output that aliases an input has the input's address.
struct Operands {
  const kvg_op& op;
  const kvg_call& call;
  int64_t dims[KVG_NUM_DIM_SYMBOLS];

  bool has(int index) const { return call.operands[index].dtype != 0; }
  int32_t dtype(int index) const { return call.operands[index].dtype; }
  template <class T>
  T* data(int index) const {
    return has(index) ? static_cast<T*>(call.operands[index].data) : nullptr;
  }
  int64_t integer(int attribute) const { return call.attributes[attribute].i; }
  double real(int attribute) const { return call.attributes[attribute].f; }
  // An attribute as float32. Refuses one that is not finite there, or that becomes 0 but is not.
  float finite(int attribute) const;
  float at_least_0(int attribute) const;  // also finite
};

Operands check(const kvg_op& op, const kvg_call* call);

// The rows of a ragged batch. Row b: new tokens [offsets[b], offsets[b + 1]) of T, at
// positions [cached[b], cached[b] + new tokens) of the row; position p in page pages[b][p / S].
struct Rows {
  const int32_t *offsets, *cached, *table;
  int64_t count, width, page_size;

  int64_t begin(int64_t row) const { return offsets[row]; }
  int64_t fresh(int64_t row) const { return int64_t{offsets[row + 1]} - offsets[row]; }
  int64_t length(int64_t row) const { return cached[row] + fresh(row); }  // after this step
  int64_t page(int64_t row, int64_t position) const {
    return table[row * width + position / page_size];
  }
};

// The rows of `in`, whose offsets, lengths and table are the operands `first_index`, +1 and +2.
// Checks their contents, and the page ids that a row with new tokens touches: those of positions
// [cached - reach, end), clipped to the row; reach < 0: all of them.
Rows check_rows(const Operands& in, int first_index, int64_t reach);

// One layer of the pool, K then V. Strides are in elements.
struct Pool {
  char* data;
  float* scales;  // nullptr: not quantised
  int32_t dtype;
  int64_t kv_heads, head_dim, scales_per_head;
  int64_t token_stride, kind_stride, page_stride, layer_offset;

  // Elements before head 0 of a token; kind 0: K, 1: V. A pool may exceed 2^31 elements.
  int64_t at(int64_t page, int64_t offset, int kind) const {
    return page * page_stride + kind * kind_stride + layer_offset + offset * token_stride;
  }
};

// Returns the pool after it checked layer, kinds and scales. `v_head_dim`: the width of V's rows.
Pool check_pool(const Operands& in, int kv_blocks, int kv_scales, int64_t layer,
                int64_t v_head_dim);

}  // namespace kvg
