#include "cuda/image.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>

#include "common/base.h"

namespace kvg::cuda {
namespace {

// The header of a 64-bit little-endian ELF file. Cubins are little-endian, as hosts are.
struct Header {
  uint8_t magic[4], bits, order, version, os_abi, abi_version, padding[7];
  uint16_t type, machine;
  uint32_t file_version;
  uint64_t entry, segments_at, sections_at;
  uint32_t flags;
  uint16_t size, segment_size, num_segments, section_size, num_sections, names_index;
};
static_assert(sizeof(Header) == 64, "the layout of ELF64");

struct Section {
  uint32_t name, type;
  uint64_t flags, address, at, size;
  uint32_t link, info;
  uint64_t alignment, entry_size;
};
static_assert(sizeof(Section) == 64, "the layout of ELF64");

constexpr uint16_t kSegmentBytes = 56;  // of a program header of ELF64
constexpr uint16_t kCudaMachine = 190;
constexpr uint32_t kNoBits = 8;  // a section without bytes in the file

// Refuses unless the whole of [at, at + size) lies in the file.
void require(uint64_t at, uint64_t size, uint64_t file, const char* what) {
  if (at > file || size > file - at)
    refuse(KVG_REFUSED, "image: expected a whole cubin, got %llu bytes, which end before its %s",
           static_cast<unsigned long long>(file), what);
}

// Refuses unless a table of the file has headers of `expected` bytes, and lies in the file.
void require_table(uint64_t at, uint16_t count, uint16_t given, size_t expected, uint64_t file,
                   const char* what) {
  if (count && given != expected)
    refuse(KVG_REFUSED, "image: expected %s of %zu bytes, got %d", what, expected, given);
  require(at, uint64_t{count} * expected, file, what);
}

Header check_elf(const uint8_t* data, uint64_t size) {
  static const uint8_t magic[] = {0x7f, 'E', 'L', 'F', 2, 1, 1};
  Header header;
  if (size < sizeof magic || std::memcmp(data, magic, sizeof magic) != 0)
    refuse(KVG_REFUSED, "image: expected a cubin (64-bit ELF), got something else");
  require(0, sizeof header, size, "header");
  std::memcpy(&header, data, sizeof header);
  if (header.machine != kCudaMachine)
    refuse(KVG_REFUSED, "image: expected a cubin (ELF machine %d), got ELF machine %d", kCudaMachine,
           header.machine);
  require_table(header.sections_at, header.num_sections, header.section_size, sizeof(Section), size,
                "section headers");
  require_table(header.segments_at, header.num_segments, header.segment_size, kSegmentBytes, size,
                "program headers");
  for (int i = 0; i < header.num_sections; ++i) {
    Section section;
    std::memcpy(&section, data + header.sections_at + i * sizeof section, sizeof section);
    if (section.type != kNoBits) require(section.at, section.size, size, "sections");
  }
  return header;
}

// The SM number in the header's flags, 0 if their layout is unknown. Measured on the output of
// ptxas 12.9, 13.0 and 13.4: ABI 7 has it in bits [0, 8) and "a" in bit 11; ABI 8 has it in bits
// [8, 16) and "a" in bit 3, which ptxas 13.x leaves clear: only the caller then knows.
int stated_number(const Header& header, bool* exact) {
  const bool old = header.abi_version == 7;
  if (!old && header.abi_version != 8) return 0;
  *exact = header.flags >> (old ? 11 : 3) & 1u;
  return static_cast<int>(header.flags >> (old ? 0 : 8) & 0xffu);
}

}  // namespace

int Arch::min_driver() const {
  struct Floor {
    int number, driver;
  };
  // Each architecture and the first CUDA release that supports it.
  static constexpr Floor floors[] = {{121, 12090}, {120, 12080}, {103, 12090}, {100, 12080},
                                     {90, 11080},  {89, 11080},  {86, 11010},  {80, 11000}};
  for (const Floor& floor : floors)
    if (number() >= floor.number) return floor.driver;
  return 10000;
}

Arch parse_arch(const char* text) {
  const size_t length = text ? std::strlen(text) : 0;
  if (length >= 5 && length <= 7 && std::memcmp(text, "sm_", 3) == 0) {
    char* end = nullptr;
    const long number = std::strtol(text + 3, &end, 10);
    // "f" (a family) runs where the plain architecture does: same major, newer minor.
    const bool suffix = *end == 'a' || *end == 'f';
    if (text[3] >= '1' && text[3] <= '9' && number >= 10 && number < 1000 && end[suffix] == 0)
      return {static_cast<int>(number / 10), static_cast<int>(number % 10), *end == 'a', text};
  }
  refuse(KVG_REFUSED, "arch: expected a name such as sm_90 or sm_90a, got \"%.20s\"",
         text ? text : "");
}

Image check_image(const kvg_cuda_image& image) {
  if (!image.data) refuse(KVG_REFUSED, "image: expected a cubin, got a null pointer");
  const auto* data = static_cast<const uint8_t*>(image.data);
  const Digest digest = sha256(data, image.size);
  if (image.sha256 && !std::equal(digest.begin(), digest.end(), image.sha256)) {
    Digest expected;
    std::copy_n(image.sha256, expected.size(), expected.begin());
    refuse(KVG_REFUSED, "image: expected SHA-256 %s, got %s: it was changed",
           shown(expected).c_str(), shown(digest).c_str());
  }
  Arch arch = parse_arch(image.arch);
  bool exact = false;
  const int number = stated_number(check_elf(data, image.size), &exact);
  if (number && number != arch.number())
    refuse(KVG_REFUSED, "image: expected a cubin for %s, got one for sm_%d", arch.name.c_str(),
           number);
  if (exact && !arch.exact) arch.exact = true, arch.name = "sm_" + std::to_string(number) + "a";
  return {arch, digest};
}

}  // namespace kvg::cuda
