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

// Makes every image of a node's field `images` known while the field is kept: for each its SHA-256,
// its size (u64, little-endian) and its bytes. Refuses what is cut, or is not what its hash says.
void publish(const std::shared_ptr<const std::string>& field);

// Refuses where no node that carries it is alive.
Image find_image(const Digest& digest, const char* kernel);

}  // namespace kvg::launch
