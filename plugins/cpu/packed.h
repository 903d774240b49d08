// Packed weights among the operands of an op: their checks, and products by pairs of panels.
#pragma once

#include "cpu/check.h"
#include "cpu/linear.h"

namespace kvg {

inline int64_t ceildiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

// The weight at operand `weight`, whose scales, multipliers and bias follow each other from `scales`
// on, for `width` inputs, which are `of`'s: what a Linear says of them, of the first expert where
// there are several. Throws a Refusal where they do not fit `bits`.
Linear read_packed(const Operands& in, int weight, int scales, int64_t bits, int64_t width,
                   const char* of);

// The same weights of another expert.
Linear of_expert(Linear job, int64_t expert);

// Bytes of weights below which a product of few rows is done before another thread has woken up.
constexpr int64_t kBytesPerTask = 32768;

// Rows [row, row + rows) of the columns of pairs [first, end); false: no memory for scratch.
bool multiply_pairs(const LinearKernels& run, const Linear& job, int64_t first, int64_t end,
                    int64_t row, int64_t rows) noexcept;

}  // namespace kvg
