// What a node's field `kernels` says: the constants that its kernels were compiled for, and for each
// architecture how they are tiled, launched and found.
//
// The field is text that kvgraph/compiler/targets/trt_fields.py writes, one entry a line:
//   kvgraph-kernels 1
//   type T|P DTYPE              of the activations, of the pool
//   dim NAME EXTENT             of the operands, by the names of contract.h
//   attribute NAME VALUE        of the op
//   arch NAME MULTIPROCESSORS STORE_TOKENS PREFILL_TOKENS DECODE_TOKENS MIN_PART MAX_PARTS
//   kernel ROLE FUNCTION WARPS SHARED_BYTES SHA256 PARAMETER...     of the last arch
// A PARAMETER is a value's name, or a pointer's with the alignment that it needs: k*16, cache_lengths*1.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "cuda/image.h"
#include "kvgraph/abi.h"
#include "launch/plan.h"

namespace kvg::launch {

struct Parameter {
  enum Kind { kOperand, kScratch, kValue } kind;
  int index;  // of the op's operands (outputs follow inputs), of Scratch or of Value
  uint32_t alignment;
};

struct Kernel {
  std::string function;
  uint32_t num_warps = 0, shared_bytes = 0;
  cuda::Digest digest{};
  std::vector<Parameter> parameters;

  bool given() const { return !function.empty(); }
};

struct ArchKernels {
  cuda::Arch arch;
  Tiling tiling;
  Kernel kernels[kNumRoles];
};

struct Kernels {
  int32_t dtypes[3] = {};  // kvg_dtype by type variable
  std::map<std::string, int64_t, std::less<>> dims;
  std::map<std::string, double, std::less<>> attributes;
  std::vector<ArchKernels> archs;

  // The one dtype that they take of an operand.
  int32_t dtype_of(const kvg_operand& operand) const;
  // The newest that runs on a device of that compute capability; refuses where none does.
  const ArchKernels& on(int major, int minor) const;
};

// Refuses what is not such a text, or lacks a kernel that `op` launches (`stores`: it writes k and
// v). Kernels whose parameters `op` does not have are left out.
Kernels parse_kernels(const kvg_op& op, const std::string& text, bool stores);

}  // namespace kvg::launch
