// The cubins of a graph. Layers with equal kernels share them: one node carries an image, the others
// name it by its SHA-256 and find it in the process.
#pragma once

#include <cstddef>
#include <memory>
#include <string>

#include "cuda/sha256.h"

namespace kvg::launch {

using cuda::Digest;

struct Image {
  std::shared_ptr<const std::string> owner;  // keeps the bytes
  const char* data;
  size_t size;
};

// Makes the images of a node's field `images` known to find_image while the field is alive. The
// field has for each image its SHA-256, its size (u64, little-endian) and its bytes. Refuses a
// field that is cut off, or an image that does not match its hash.
void publish(const std::shared_ptr<const std::string>& field);

// Finds an image for the kernel named `kernel`. Refuses if no living node carries it.
Image find_image(const Digest& digest, const char* kernel);

}  // namespace kvg::launch
