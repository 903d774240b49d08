#include "launch/images.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <mutex>
#include <vector>

#include "common/base.h"

namespace kvg::launch {
namespace {

struct Place {
  std::weak_ptr<const std::string> owner;
  size_t at, size;
};

// All places of each image in memory: graphs that share an image come and go in any order.
using Places = std::map<Digest, std::vector<Place>>;

std::mutex g_mutex;  // guards the places
Places& places() {
  static auto& instance = *new Places;  // graphs may outlive static destructors
  return instance;
}

void add(const Digest& digest, const Place& place) {
  std::lock_guard<std::mutex> lock(g_mutex);
  std::vector<Place>& known = places()[digest];
  known.erase(std::remove_if(known.begin(), known.end(),
                             [](const Place& old) { return old.owner.expired(); }),
              known.end());
  known.push_back(place);
}

uint64_t little_endian(const char* bytes) {
  uint64_t value = 0;
  for (int i = 7; i >= 0; --i) value = value << 8 | static_cast<uint8_t>(bytes[i]);
  return value;
}

}  // namespace

void publish(const std::shared_ptr<const std::string>& field) {
  constexpr size_t header = sizeof(Digest) + 8;
  const std::string& bytes = *field;
  for (size_t at = 0; at < bytes.size();) {
    const size_t left = bytes.size() - at;
    if (left == 1 && !bytes[at]) return;  // the final NUL of a string, from the parser
    const uint64_t size = left >= header ? little_endian(&bytes[at + sizeof(Digest)]) : 0;
    if (left < header || size > left - header)
      refuse(KVG_REFUSED, "field images: expected whole images, got %zu bytes, which end inside one",
             bytes.size());
    Digest said;
    std::memcpy(said.data(), &bytes[at], sizeof said);
    const Digest found = cuda::sha256(&bytes[at + header], size);
    if (said != found)
      refuse(KVG_REFUSED, "field images: expected SHA-256 %s, got %s: it was changed",
             cuda::shown(said).c_str(), cuda::shown(found).c_str());
    add(said, {field, at + header, static_cast<size_t>(size)});
    at += header + size;
  }
}

Image find_image(const Digest& digest, const char* kernel) {
  std::lock_guard<std::mutex> lock(g_mutex);
  for (const Place& place : places()[digest])
    if (auto owner = place.owner.lock()) return {owner, owner->data() + place.at, place.size};
  refuse(KVG_REFUSED, "%s: expected image %s from the node of this graph that carries it, got none",
         kernel, cuda::shown(digest).c_str());
}

}  // namespace kvg::launch
