// SHA-256 (FIPS 180-4), as in an artifact's manifest: it names an image and detects a changed one.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>

namespace kvg::cuda {

using Digest = std::array<uint8_t, 32>;

Digest sha256(const void* data, size_t size);

// The first 16 hexadecimal digits, as error messages show a hash.
std::string shown(const Digest& digest);

}  // namespace kvg::cuda
