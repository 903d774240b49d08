// One step of an op on a device: kernels loaded once, launched with the extents of the operands.
#pragma once

#include <cstdint>
#include <memory>

#include "tensorrt/settings.h"

namespace kvg::tensorrt {

// What the launches of a step read: addresses and extents by position in Settings::operands.
struct Tensors {
  const trt::TensorDesc* desc[kMaxOperands];
  void* data[kMaxOperands];
};

// Kernels of one device, found in the images and loaded when the first step needs them: neither a
// constructor nor a clone asks the device for anything.
class Device {
 public:
  void run(const Settings& settings, const Tensors& tensors, void* workspace, trt::Stream* stream);

 private:
  void load(const Settings& settings);

  const ArchKernels* arch_ = nullptr;
  int ordinal_ = -1;
  uint64_t modules_[kNumRoles] = {};
};

// Bytes of workspace that any step up to these extents needs on any of the archs.
size_t workspace_bytes(const Settings& settings, const trt::Dims* most);

// Extent of a symbolic dim of contract.h over the inputs; refuses where two of them disagree.
int64_t extent_of(const Settings& settings, const trt::Dims* const* dims, int32_t symbol);

}  // namespace kvg::tensorrt
