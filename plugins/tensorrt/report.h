// Refusals: one sentence each, thrown inside (cuda/refuse.h), handed out where TensorRT calls.
#pragma once

#include <exception>
#include <string>

#include "abi/tensorrt.h"
#include "cuda/refuse.h"

namespace kvg::tensorrt {

using cuda::refuse;

// To TensorRT's logger, if it has one for this thread, and to `last_sentence`.
void report(const std::string& sentence) noexcept;

// What was reported last in this process; empty if nothing was.
std::string last_sentence();

void use_logger_finder(trt::LoggerFinder* finder);

// Runs a method's body: 0, or 1 after the sentence of what it threw was reported.
template <class Body>
int32_t guarded(Body&& body) noexcept {
  try {
    body();
    return 0;
  } catch (const std::exception& error) {
    report(error.what());
    return 1;
  }
}

}  // namespace kvg::tensorrt
