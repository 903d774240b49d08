// The content of a node's field `kernels`, a record of launch.h: the constants that its kernels
// were compiled for, and for each architecture their tiling, launch parameters and images.
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
  kvg_kernel kernels[KVG_ROLE_COUNT];  // with operand indices of the node's op
};

struct Kernels {
  kvg_constants constants;
  int64_t dims[KVG_NUM_DIM_SYMBOLS] = {};  // 0: known at run time only
  std::map<std::string, double, std::less<>> attributes;
  std::vector<ArchKernels> archs;
  uint32_t taken = 0;  // a bit for each operand of the node's op that a kernel takes

  // The dtype that the kernels take for an operand.
  int32_t dtype_of(const kvg_operand& operand) const;
  // The extent that the kernels take for a dim; 0: any.
  int64_t extent_of(const kvg_dim& dim) const;
  // The kernels of the newest architecture that a device of that capability runs; refuses if none.
  const ArchKernels& on(int major, int minor) const;
};

// Reads a record. Refuses one that is malformed or lacks a kernel that `op` launches (`stores`: it
// writes k and v). Leaves out kernels with a parameter that `op` does not have.
Kernels read_kernels(const kvg_op& op, const std::string& record, bool stores);

inline bool given(const kvg_kernel& kernel) { return *kernel.function; }

}  // namespace kvg::launch
