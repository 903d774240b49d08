// What a node's field `kernels` says, a record of launch.h: the constants that its kernels were
// compiled for, and for each architecture how they are tiled, launched and found.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "cuda/image.h"
#include "kvgraph/abi.h"
#include "kvgraph/launch.h"

namespace kvg::launch {

struct ArchKernels {
  cuda::Arch arch;
  kvg_tiling tiling;
  kvg_kernel kernels[KVG_ROLE_COUNT];  // their operands have the indices of the node's op
};

struct Kernels {
  kvg_constants constants;
  int64_t dims[KVG_NUM_DIM_SYMBOLS] = {};  // 0: known at run time only
  std::map<std::string, double, std::less<>> attributes;
  std::vector<ArchKernels> archs;

  // The one dtype that they take of an operand.
  int32_t dtype_of(const kvg_operand& operand) const;
  // The extent that they take of a dim; 0: any.
  int64_t extent_of(const kvg_dim& dim) const;
  // The newest that runs on a device of that compute capability; refuses where none does.
  const ArchKernels& on(int major, int minor) const;
};

// Refuses what is not such a record, or lacks a kernel that `op` launches (`stores`: it writes k and
// v). Kernels whose parameters `op` does not have are left out.
Kernels read_kernels(const kvg_op& op, const std::string& record, bool stores);

inline bool given(const kvg_kernel& kernel) { return *kernel.function; }

}  // namespace kvg::launch
