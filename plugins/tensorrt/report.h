// Refusals: one sentence each, thrown inside (common/base.h) and reported in methods that TensorRT
// calls.
#pragma once

#include <exception>
#include <string>

#include "abi/tensorrt.h"
#include "common/base.h"

namespace kvg::tensorrt {

// Sends a sentence to TensorRT's logger, if it has one for this thread, and to `last_sentence`.
void report(const char* sentence) noexcept;

// The sentence that was reported last in this process; empty if there was none.
std::string last_sentence();

void use_logger_finder(trt::LoggerFinder* finder);

// Runs a method's body. Returns 0, or 1 after it reported the sentence of an exception.
template <class Body>
int32_t guarded(Body&& body) noexcept {
  try {
    body();
    return 0;
  } catch (const std::exception& error) {
    report(failure_of(error).sentence);
    return 1;
  }
}

}  // namespace kvg::tensorrt
