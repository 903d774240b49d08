// Refusals: one sentence each, thrown inside the library and returned by entry points as a message.
#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>

#include "kvgraph/launch.h"

namespace kvg::cuda {

struct Refusal : std::runtime_error {
  kvg_status status;
  Refusal(kvg_status kind, const std::string& sentence)
      : std::runtime_error(sentence), status(kind) {}
};

[[noreturn]] __attribute__((format(printf, 2, 3))) void refuse(kvg_status status,
                                                               const char* format, ...);

void say(const char* sentence, char* message, size_t message_size);

// Checks the first two fields of a struct, before any other field is read.
template <class Struct>
void check_frame(const char* what, const Struct* given) {
  if (!given) refuse(KVG_REFUSED, "%s: expected a struct, got a null pointer", what);
  if (given->abi_version != KVG_LAUNCH_ABI_VERSION)
    refuse(KVG_REFUSED, "%s: expected ABI version %d of this library, got %u from its caller", what,
           KVG_LAUNCH_ABI_VERSION, given->abi_version);
  if (given->struct_size < sizeof(Struct))
    refuse(KVG_REFUSED, "%s: expected a struct of at least %zu bytes, got %u", what, sizeof(Struct),
           given->struct_size);
}

// Runs an entry point's body and returns its status; no exception leaves it.
template <class Body>
int32_t entry(char* message, size_t message_size, Body&& body) {
  try {
    body();
    return KVG_DONE;
  } catch (const Refusal& refusal) {
    say(refusal.what(), message, message_size);
    return refusal.status;
  } catch (const std::exception& error) {
    say(error.what(), message, message_size);
    return KVG_REFUSED;
  }
}

}  // namespace kvg::cuda
