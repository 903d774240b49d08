// One step of an op on a device: kernels loaded once, launched with the extents of the operands.
// Knows no host runtime: an adapter hands in operands, scratch memory and a stream.
//
// Operands are the op's, in the order of its table in contract.h; dtype 0: left out.
#pragma once

#include <cstdint>

#include "kvgraph/abi.h"
#include "launch/kernels.h"
#include "launch/plan.h"

namespace kvg::launch {

constexpr int kMaxOperands = KVG_MAX_OPERANDS, kMaxAttributes = KVG_MAX_ATTRIBUTES;

// A node of a graph, with the kernels that were compiled for it.
struct Node {
  const kvg_op* op = nullptr;
  kvg_value attributes[kMaxAttributes] = {};
  Kernels kernels;

  int64_t attribute(const char* name, int64_t otherwise) const;
};

// Refuses an attribute that is a constant of the kernels and not this one.
void check_attributes(const Node& node);

// Refuses inputs of another dtype, rank or extent than the kernels were compiled for.
void check_operands(const Node& node, const kvg_tensor* operands);

// The sizes of a step; refuses where two inputs disagree. `max_lengths` is the first row of that
// input where the host can read it; null: the bounds that the other extents give.
kvg_sizes sizes_of(const Node& node, const kvg_tensor* operands, const int32_t* max_lengths);

// Bytes of scratch memory that a step uses.
size_t scratch_bytes(const kvg_plan& plan);

// The same of any step up to these extents, on any of the archs.
size_t scratch_bound(const Node& node, const kvg_tensor* most);

enum class Multiprocessors { kTypical, kOwn };

// Kernels of one device, found in the images and loaded when the first step needs them: neither a
// constructor nor a copy asks the device for anything. One thread at a time.
class Device {
 public:
  // What a step launches on the thread's device. kTypical: as `scratch_bound` reckons with.
  kvg_plan plan(const Node& node, const kvg_tensor* operands, const kvg_sizes& sizes,
                Multiprocessors count);
  // `scratch`: device memory of `scratch_bytes`. Enqueues on `stream`, a CUstream.
  void run(const Node& node, const kvg_tensor* operands, const kvg_plan& plan, void* scratch,
           void* stream) const;

 private:
  void load(const Kernels& kernels);

  const ArchKernels* arch_ = nullptr;
  int ordinal_ = -1;
  int32_t multiprocessors_ = 0;
  uint64_t modules_[KVG_ROLE_COUNT] = {};
};

}  // namespace kvg::launch
