// One step of an op on a device: kernels are loaded once and launched with the extents of the
// operands. This code knows no host runtime: an adapter gives it operands, scratch memory and a
// stream.
//
// Operands are in the order of the op's table in contract.h; dtype 0: left out.
#pragma once

#include <array>
#include <cstdint>

#include "cuda/driver.h"
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

// Refuses an attribute that differs from the constant that the kernels were compiled for.
void check_attributes(const Node& node);

// Refuses an optional input that no kernel reads: its effect would be lost.
void check_taken(const Node& node, int operand);

// Refuses inputs of another dtype, rank or extent than the kernels were compiled for.
void check_operands(const Node& node, const kvg_tensor* operands);

// The sizes of a step; refuses if two inputs disagree. `max_lengths`: the first row of that input,
// if the host can read it; null: the lengths are bounded by the extents of the other inputs.
kvg_sizes sizes_of(const Node& node, const kvg_tensor* operands, const int32_t* max_lengths);

// Bytes of scratch memory that a step uses.
size_t scratch_bytes(const kvg_plan& plan);

// Most bytes of scratch memory that a step up to the extents of `most` uses, on any architecture.
size_t scratch_bound(const Node& node, const kvg_tensor* most);

enum class Multiprocessors { kTypical, kOwn };

// Kernels of one context, found in the images and loaded when the first step needs them: neither a
// constructor nor a copy uses the device. Only one thread at a time may use an object.
class Device {
 public:
  // Plans the launches of a step on the thread's device, with its number of multiprocessors (kOwn)
  // or that of the tiling, which `scratch_bound` uses (kTypical).
  kvg_plan plan(const Node& node, const kvg_tensor* operands, const kvg_sizes& sizes,
                Multiprocessors count);
  // Enqueues the launches on `stream`, a CUstream. `scratch`: device memory of `scratch_bytes`.
  void run(const Node& node, const kvg_tensor* operands, const kvg_plan& plan, void* scratch,
           void* stream) const;

 private:
  void load(const Kernels& kernels);

  const ArchKernels* arch_ = nullptr;
  const cuda::Context* context_ = nullptr;
  int32_t multiprocessors_ = 0;
  std::array<uint64_t, KVG_ROLE_COUNT> modules_ = {};
};

}  // namespace kvg::launch
