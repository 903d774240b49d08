// Runs independent tasks: on the host's threads if a call gives parallel_for, else on our own pool.
#pragma once

#include <atomic>
#include <cstddef>
#include <exception>
#include <thread>
#include <type_traits>
#include <utility>

#include "kvgraph/abi.h"

namespace kvg {

// Waits a moment in a loop that spins.
inline void pause_briefly() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  __asm__ volatile("isb");
#else
  std::this_thread::yield();
#endif
}

// Number of threads that the tasks of `call` can expect to run on.
size_t parallelism(const kvg_call& call);

void parallel_for(const kvg_call& call, kvg_task fn, void* task, size_t count);

// Wraps a body as a task, which must not throw; keeps the first exception.
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

// Calls body(index) for every index in [0, count), in any order. The first exception is thrown here
// once all calls are done.
template <class Body>
void parallel_for(const kvg_call& call, size_t count, Body&& body) {
  Guarded<std::remove_reference_t<Body>> guarded(body);
  parallel_for(call, guarded.run, &guarded, count);
  if (guarded.first) std::rethrow_exception(guarded.first);
}

// Does as parallel_for, and starts the calls in the order of their indices: a host may give each of
// its threads a range of them.
template <class Body>
void in_order(const kvg_call& call, size_t count, Body&& body) {
  std::atomic<size_t> next{0};
  parallel_for(call, count, [&](size_t) { body(next.fetch_add(1, std::memory_order_relaxed)); });
}

// An object whose memory the thread keeps from one call to its next. A call takes the object and
// gives it back at its end: inside parallel_for, a host may run another call on the same thread,
// which then finds an empty one.
template <class Object>
class Taken {
 public:
  Taken() : object_(std::move(kept())) {}
  ~Taken() { kept() = std::move(object_); }
  Taken(const Taken&) = delete;
  Taken& operator=(const Taken&) = delete;

  Object& operator*() { return object_; }
  Object* operator->() { return &object_; }

 private:
  static Object& kept() {
    static thread_local Object object;
    return object;
  }

  Object object_;
};

}  // namespace kvg
