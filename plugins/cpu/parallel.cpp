#include "cpu/parallel.h"

#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
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

// Layers of a model follow each other within microseconds: workers spin this long before sleeping.
constexpr int kSpins = 2000;
constexpr size_t kMaxThreads = 1024;

// What was asked of the pools of this process and of its forked children; 0: the default.
std::atomic<size_t> g_asked{0};

size_t asked_threads() {
  const size_t asked = g_asked.load();
  return std::min(kMaxThreads, asked ? asked : default_threads());
}

// A pool that runs one job at a time; a second caller runs its tasks itself. Threads start with the
// first job.
class Pool {
 public:
  void run(kvg_task fn, void* task, size_t count) {
    std::unique_lock<std::mutex> turn(turn_, std::try_to_lock);
    if (!turn || threads_ <= 1) {
      for (size_t i = 0; i < count; ++i) fn(task, i);
      return;
    }
    start();
    {
      std::lock_guard<std::mutex> lock(mutex_);
      fn_ = fn, task_ = task, count_ = count;
      next_.store(0, std::memory_order_relaxed);
      open_ = true;
      generation_.fetch_add(1, std::memory_order_release);
    }
    wake_.notify_all();
    drain();
    std::unique_lock<std::mutex> lock(mutex_);
    open_ = false;  // a worker that wakes from now on finds nothing to do
    idle_.wait(lock, [this] { return busy_ == 0; });
  }

  void resize() {
    std::lock_guard<std::mutex> turn(turn_);
    {
      std::lock_guard<std::mutex> lock(mutex_);
      stop_ = true;
      generation_.fetch_add(1, std::memory_order_release);
    }
    wake_.notify_all();
    for (std::thread& worker : workers_) worker.join();
    workers_.clear();
    stop_ = false;
    threads_ = asked_threads();
  }

  size_t threads() const { return threads_; }

 private:
  void start() {
    try {
      while (workers_.size() + 1 < threads_)
        workers_.emplace_back([this, seen = generation_.load()] { work(seen); });
    } catch (const std::system_error&) {  // no more threads: uses those that started
      threads_ = workers_.size() + 1;
    }
  }

  void work(uint64_t seen) {
    for (;;) {
      for (int i = 0; i < kSpins && generation_.load(std::memory_order_acquire) == seen; ++i)
        pause_briefly();
      {
        std::unique_lock<std::mutex> lock(mutex_);
        wake_.wait(lock, [&] { return generation_.load() != seen; });
        seen = generation_.load();
        if (stop_) return;
        if (!open_) continue;
        ++busy_;
      }
      drain();
      std::lock_guard<std::mutex> lock(mutex_);
      if (--busy_ == 0) idle_.notify_one();
    }
  }

  void drain() {
    for (size_t i; (i = next_.fetch_add(1, std::memory_order_relaxed)) < count_;) fn_(task_, i);
  }

  std::mutex turn_;   // held by the caller whose job runs
  std::mutex mutex_;  // guards what follows
  std::condition_variable wake_, idle_;
  kvg_task fn_ = nullptr;
  void* task_ = nullptr;
  size_t count_ = 0;
  size_t busy_ = 0;  // workers inside the open job
  bool open_ = false, stop_ = false;
  std::atomic<size_t> next_{0};
  std::atomic<uint64_t> generation_{0};
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
