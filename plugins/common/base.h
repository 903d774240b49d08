// What the parts for CPUs and for GPUs share. A refusal is one sentence, thrown inside a library; at
// its border it becomes a status and a message.
#pragma once

#include <cstddef>
#include <cstdint>
#include <exception>
#include <stdexcept>
#include <string>

#include "kvgraph/abi.h"
#include "kvgraph/launch.h"

namespace kvg {

inline int64_t ceildiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

struct Refusal : std::runtime_error {
  kvg_status status;
  Refusal(kvg_status kind, const std::string& sentence)
      : std::runtime_error(sentence), status(kind) {}
};

// Throw a Refusal; without a status, with KVG_REFUSED.
[[noreturn]] __attribute__((format(printf, 1, 2))) void refuse(const char* format, ...);
[[noreturn]] __attribute__((format(printf, 2, 3))) void refuse(kvg_status status,
                                                               const char* format, ...);

// Refuses operand `index`, an output that aliases an input, at another address than the input's. Of
// a pool without elements any address will do.
void check_alias(const kvg_op& op, int index, const kvg_tensor* operands);

// The status and the sentence of an exception.
struct Failure {
  kvg_status status;
  const char* sentence;  // lives as long as the exception
};

Failure failure_of(const std::exception& error);

void say(const char* sentence, char* message, size_t message_size);

// Runs an entry point's body and returns its status; the sentence of an exception goes to `message`.
template <class Body>
int32_t entry(char* message, size_t message_size, Body&& body) {
  try {
    body();
    return KVG_DONE;
  } catch (const std::exception& error) {
    const Failure failure = failure_of(error);
    say(failure.sentence, message, message_size);
    return failure.status;
  }
}

}  // namespace kvg
