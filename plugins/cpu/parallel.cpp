#include "cpu/parallel.h"

#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

namespace kvg {
namespace {

size_t default_threads() {
#if defined(__linux__)
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof set, &set) == 0 && CPU_COUNT(&set) > 0)
    return static_cast<size_t>(CPU_COUNT(&set));
#endif
  const unsigned count = std::thread::hardware_concurrency();
  return count ? count : 1;
}

// Layers of a model follow each other within microseconds, and threads end a job within
// microseconds of each other: all spin this long before they sleep. Longer spins keep a processor
// from other threads if there are more threads than processors.
constexpr auto kSpin = std::chrono::microseconds(50);

// Returns true as soon as is_done() does, or false after kSpin.
template <class Body>
bool spin_until(Body&& is_done) {
  constexpr int kTurns = 64;  // from one look at the clock to the next
  const auto end = std::chrono::steady_clock::now() + kSpin;
  do {
    for (int i = 0; i < kTurns; ++i, pause_briefly())
      if (is_done()) return true;
  } while (std::chrono::steady_clock::now() < end);
  return false;
}

constexpr size_t kMaxThreads = 1024;

// What was asked of the pools of this process and of its forked children; 0: the default.
std::atomic<size_t> g_asked{0};

size_t asked_threads() {
  const size_t asked = g_asked.load();
  return std::min(kMaxThreads, asked ? asked : default_threads());
}

// A pool that runs one job at a time; a second caller runs its tasks itself. Threads start with the
// first job.
//
// Decision: workers enter and leave a job through one atomic number, and a lock is taken only to
// sleep. With a lock at the begin and the end of each job, 65 linear layers of one row (215 MB in
// int8, 2 threads of Zen 4) took 8 to 12 % longer.
class Pool {
 public:
  void run(kvg_task fn, void* task, size_t count) {
    std::unique_lock<std::mutex> turn(turn_, std::try_to_lock);
    if (!turn || threads_ <= 1) {
      for (size_t i = 0; i < count; ++i) fn(task, i);
      return;
    }
    start();
    fn_ = fn, task_ = task, count_ = count;
    next_.store(0, std::memory_order_relaxed);
    state_.fetch_add(kTurn);  // opens the job
    if (sleepers_.load()) wake(wake_);
    drain();
    state_.fetch_add(kTurn);  // closes it: no more workers enter
    wait_for_workers();
  }

  void resize() {
    std::lock_guard<std::mutex> turn(turn_);
    stop_.store(true);
    wake(wake_);
    for (std::thread& worker : workers_) worker.join();
    workers_.clear();
    stop_.store(false);
    threads_ = asked_threads();
  }

  size_t threads() const { return threads_; }

 private:
  // state_: the number of workers inside the job, and in units of kTurn how often a job was opened
  // or closed. It is open if that is odd.
  static constexpr uint64_t kTurn = 1 << 16, kInside = kTurn - 1;
  static_assert(kMaxThreads <= kInside);

  static bool is_open(uint64_t state, uint64_t seen) {
    return (state & kTurn) && state / kTurn != seen;
  }

  void start() {
    try {
      while (workers_.size() + 1 < threads_) workers_.emplace_back([this] { work(); });
    } catch (const std::system_error&) {  // no more threads: uses those that started
      threads_ = workers_.size() + 1;
    }
  }

  // Wakes threads that sleep at `changed`. Taking the lock waits for one that is about to sleep;
  // one that woke while it is held would wait for it at once.
  void wake(std::condition_variable& changed) {
    { std::lock_guard<std::mutex> lock(mutex_); }
    changed.notify_all();
  }

  void wait_for_workers() {
    const auto is_done = [this] { return !(state_.load() & kInside); };
    if (spin_until(is_done)) return;
    std::unique_lock<std::mutex> lock(mutex_);
    is_waiting_.store(true);
    idle_.wait(lock, is_done);
    is_waiting_.store(false);
  }

  void work() {
    uint64_t seen = 0;  // the turn of the last job
    while (!stop_.load()) {
      if (spin_until([&] { return stop_.load(std::memory_order_relaxed) || take_part(seen); }))
        continue;
      std::unique_lock<std::mutex> lock(mutex_);
      sleepers_.fetch_add(1);
      wake_.wait(lock, [&] { return stop_.load() || is_open(state_.load(), seen); });
      sleepers_.fetch_sub(1);
    }
  }

  // Works on the open job, unless that is `seen`; returns whether it did.
  bool take_part(uint64_t& seen) {
    uint64_t state = state_.load(std::memory_order_relaxed);
    do {
      if (!is_open(state, seen)) return false;
    } while (!state_.compare_exchange_weak(state, state + 1));
    seen = state / kTurn;
    drain();
    if ((state_.fetch_sub(1) & kInside) == 1 && is_waiting_.load()) wake(idle_);
    return true;
  }

  void drain() {
    for (size_t i; (i = next_.fetch_add(1, std::memory_order_relaxed)) < count_;) fn_(task_, i);
  }

  std::mutex turn_;   // held by the caller whose job runs
  std::mutex mutex_;  // taken to sleep and to wake
  std::condition_variable wake_, idle_;
  std::atomic<int> sleepers_{0};          // workers that sleep
  std::atomic<bool> is_waiting_{false};   // whether the caller sleeps
  std::atomic<bool> stop_{false};
  kvg_task fn_ = nullptr;  // these change while the job is closed and no worker is inside
  void* task_ = nullptr;
  size_t count_ = 0;
  alignas(64) std::atomic<uint64_t> state_{0};
  alignas(64) std::atomic<size_t> next_{0};
  std::atomic<size_t> threads_{asked_threads()};
  std::vector<std::thread> workers_;
};

std::atomic<Pool*> g_pool{nullptr};

// The pool of this process. Never destroyed: its threads may outlive static destructors. A forked
// child has none of the threads, so it forgets the pool and makes its own, of as many threads.
Pool& pool() {
  Pool* existing = g_pool.load(std::memory_order_acquire);
  if (existing) return *existing;
  static const int registered = pthread_atfork(nullptr, nullptr, [] { g_pool.store(nullptr); });
  (void)registered;
  Pool* fresh = new Pool;
  if (g_pool.compare_exchange_strong(existing, fresh)) return *fresh;
  delete fresh;
  return *existing;
}

}  // namespace

size_t parallelism(const kvg_call& call) {
  return call.parallel_for && call.num_threads ? call.num_threads : pool().threads();
}

void parallel_for(const kvg_call& call, kvg_task fn, void* task, size_t count) {
  if (count == 1) return fn(task, 0);
  if (count == 0) return;
  if (call.parallel_for) return call.parallel_for(call.host, fn, task, count);
  pool().run(fn, task, count);
}

}  // namespace kvg

extern "C" void kvg_cpu_set_num_threads(uint32_t count) {
  kvg::g_asked.store(count);
  kvg::pool().resize();
}

extern "C" uint32_t kvg_cpu_num_threads(void) {
  return static_cast<uint32_t>(kvg::pool().threads());
}
