// Running independent tasks: on the host's threads where a call brings them, else on our own pool.
#pragma once

#include <cstddef>
#include <type_traits>

#include "kvgraph/abi.h"

namespace kvg {

// Threads that `call`'s tasks can expect to run on.
size_t parallelism(const kvg_call& call);

void parallel_for(const kvg_call& call, kvg_task fn, void* task, size_t count);

// body(index) for every index in [0, count), in any order; it must not throw.
template <class Body>
void parallel_for(const kvg_call& call, size_t count, Body&& body) {
  using Plain = std::remove_reference_t<Body>;
  auto invoke = [](void* task, size_t index) { (*static_cast<Plain*>(task))(index); };
  parallel_for(call, invoke, &body, count);
}

}  // namespace kvg
