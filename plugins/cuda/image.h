// The architecture and hash of a cubin, and the devices that run it.
#pragma once

#include <string>

#include "cuda/sha256.h"
#include "kvgraph/launch.h"

namespace kvg::cuda {

// An architecture. "sm_90" runs on compute capability 9.0 and newer 9.x; "sm_90a" (exact) on 9.0.
struct Arch {
  int major, minor;
  bool exact;
  std::string name;

  int number() const { return 10 * major + minor; }
  bool runs_on(int device_major, int device_minor) const {
    return device_major == major && (exact ? device_minor == minor : device_minor >= minor);
  }
  // The first driver, as 1000 * major + 10 * minor, that supports the architecture.
  int min_driver() const;
};

Arch parse_arch(const char* text);

// A cubin that passed check_image: the architecture is the caller's, made exact if the image is.
struct Image {
  Arch arch;
  Digest digest;
};
Image check_image(const kvg_cuda_image& image);

}  // namespace kvg::cuda
