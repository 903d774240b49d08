// Running independent tasks: on the host's threads where a call brings them, else on our own pool.
#pragma once

#include <atomic>
#include <cstddef>
#include <exception>
#include <type_traits>

#include "kvgraph/abi.h"

namespace kvg {

// Threads that `call`'s tasks can expect to run on.
size_t parallelism(const kvg_call& call);

void parallel_for(const kvg_call& call, kvg_task fn, void* task, size_t count);

// A body as a task, which must not throw: its first exception is kept.
template <class Body>
struct Guarded {
  explicit Guarded(Body& body) : body(body) {}

  static void run(void* task, size_t index) noexcept {
    auto& guarded = *static_cast<Guarded*>(task);
    try {
      guarded.body(index);
    } catch (...) {
      if (!guarded.failed.exchange(true)) guarded.first = std::current_exception();
    }
  }

  Body& body;
  std::atomic<bool> failed{false};
  std::exception_ptr first;
};

// body(index) for every index in [0, count), in any order. What it throws first is thrown here, once
// all are done.
template <class Body>
void parallel_for(const kvg_call& call, size_t count, Body&& body) {
  Guarded<std::remove_reference_t<Body>> guarded(body);
  parallel_for(call, guarded.run, &guarded, count);
  if (guarded.first) std::rethrow_exception(guarded.first);
}

}  // namespace kvg
