// Packed weights among the operands of an op: their checks, and products by pairs of panels.
#pragma once

#include <algorithm>

#include "cpu/check.h"
#include "cpu/linear.h"
#include "cpu/parallel.h"
#include "cpu/reads.h"

namespace kvg {

// How weights are stored: fields of a Linear. `stem`: what the attributes' names begin with.
struct Form {
  int64_t bits, group, codes;
  const char* stem = "";
};

// Reads the weight at operand `weight` for `width` inputs; its scales, bytes of groups and bias are
// the operands from `scales` on. `of`: names the inputs in a refusal. With several experts, the
// result is the first one's weight. Throws a Refusal if an operand does not fit `form`.
Linear read_packed(const Operands& in, int weight, int scales, const Form& form, int64_t width,
                   const char* of);

// Throws a Refusal if sums of products of `width` inputs, which `name` names, may not fit int32.
void check_summed(const Operands& in, const Linear& job, int64_t width, const char* name);

// The same weights of another expert.
Linear of_expert(Linear job, int64_t expert);

// Starts to read what is missing of the weights of `job`.
void start_reads(const Linear& job, Reads& reads);

// Bytes from one prepared row to the next: a line more than a row, which is often a power of two of
// bytes, so that rows of a tile are in different sets of the cache.
int64_t stride_of(const LinearKernels& run, const Linear& job);

// Elements of rows that are prepared or summed before another thread wakes up.
constexpr int64_t kElementsPerTask = 16384;

// Calls body(row) for each row, of `elements` elements.
template <class Body>
void for_rows(const kvg_call& call, int64_t rows, int64_t elements, Body&& body) {
  const int64_t chunk = std::max<int64_t>(1, kElementsPerTask / elements);
  parallel_for(call, static_cast<size_t>(ceildiv(rows, chunk)), [&](size_t task) {
    const int64_t begin = static_cast<int64_t>(task) * chunk;
    for (int64_t row = begin; row < std::min(rows, begin + chunk); ++row) body(row);
  });
}

// Computes the products of some jobs, whose rows and panels have one size. Tasks are cut so that
// threads end at the same time, however many rows each job has.
void multiply(const kvg_call& call, const LinearKernels& run, const Linear* jobs, size_t count);

}  // namespace kvg
