#include "cpu/group.h"

#include <poll.h>
#include <sched.h>
#include <time.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <climits>
#include <thread>

#include "cpu/check.h"
#include "cpu/lifelines.h"
#include "cpu/parallel.h"

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace kvg {
namespace {

using Clock = std::chrono::steady_clock;

// Time to spin before sleeping: ranks that compute at the same time differ by less, and sleeping
// costs more.
constexpr auto kSpin = std::chrono::microseconds(100);
constexpr auto kSleep = std::chrono::milliseconds(20);  // until the other rank is checked again

// How long ranks on several hosts may take to tell each other why a step fails, or that they wait.
constexpr auto kAnswer = std::chrono::milliseconds(1500);

// A longer timeout counts as this one: times of the clock fit 64 bits.
constexpr int64_t kLongest = int64_t{1} << 40;  // milliseconds

// The pieces that a rank has published: how many, and the bytes of the last two, indexed by the
// lowest bit of their number: a rank may publish the next piece before this one is read. Padded
// rather than aligned: the caller's memory is at a multiple of 8.
struct Line {
  std::atomic<uint32_t> calls;
  std::atomic<uint32_t> sleepers;
  std::atomic<uint64_t> bytes[2];
  char padding[40];
};

struct Shared {
  Line lines[KVG_MOST_RANKS];
  std::atomic<uint32_t> broken;  // as in kvg_cpu_group_broken; set once, for all ranks
  char padding[60];
  Heard heard;  // used by a rank that gathers
};

static_assert(std::atomic<uint64_t>::is_always_lock_free && sizeof(std::atomic<uint32_t>) == 4,
              "processes share them");
static_assert(sizeof(Line) == 64 && alignof(Shared) <= 8);

constexpr size_t kPieces = (sizeof(Shared) + 63) / 64 * 64;  // where the pieces begin

thread_local kvg_group* t_group = nullptr;

bool is_whole(const kvg_group* group) {
  return group && group->memory && group->size >= 1 && group->size <= KVG_MOST_RANKS &&
         group->rank >= 0 && group->rank < group->size;
}

Shared& shared(const kvg_group& group) { return *static_cast<Shared*>(group.memory); }

char* place(const kvg_group& group, uint64_t call, int32_t rank) {
  const size_t index = (call & 1) * static_cast<size_t>(group.size) + static_cast<size_t>(rank);
  return static_cast<char*>(group.memory) + kPieces + index * kPieceBytes;
}

// Sleeps while `word` is `seen`, for kSleep at most.
void sleep_on(std::atomic<uint32_t>& word, uint32_t seen) {
#if defined(__linux__)
  const timespec limit = {0, std::chrono::nanoseconds(kSleep).count()};
  syscall(SYS_futex, &word, FUTEX_WAIT, seen, &limit, nullptr, 0);
#else
  (void)word, (void)seen;
  std::this_thread::sleep_for(std::chrono::microseconds(50));
#endif
}

void wake_all(std::atomic<uint32_t>& word) {
#if defined(__linux__)
  syscall(SYS_futex, &word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
#else
  (void)word;
#endif
}

bool has_ended(const kvg_group& group, int32_t rank) {
  if (!group.exits || group.exits[rank] < 0) return false;
  pollfd exit = {group.exits[rank], POLLIN, 0};
  return poll(&exit, 1, 0) == 1;
}

void mark_broken(const kvg_group& group, int32_t rank, uint32_t reason) {
  uint32_t none = 0;
  Shared& all = shared(group);
  const bool is_news =
      all.broken.compare_exchange_strong(none, reason << 16 | static_cast<uint32_t>(rank));
  if (group.gather) {
    if (is_news) tell_all(group, static_cast<uint8_t>(reason), static_cast<uint8_t>(rank));
    return;
  }
  for (int32_t i = 0; i < group.size; ++i) wake_all(all.lines[i].calls);
}

// Returns why a group that gathers fails, from the messages received so far; 0: it does not.
uint32_t heard_of(const kvg_group& group) {
  Shared& all = shared(group);
  if (all.broken.load() == 0)
    if (const uint32_t broken = listen_to_all(group, all.heard))
      mark_broken(group, static_cast<int32_t>(broken & 0xffff), broken >> 16);
  return all.broken.load();
}

Clock::time_point deadline_of(const kvg_group& group, Clock::time_point start) {
  return start + std::chrono::milliseconds(std::min(group.timeout_ms, kLongest));
}

// The thread's group; refuses unless it has `ranks` ranks.
kvg_group& entered(const char* op, int64_t ranks) {
  const auto count = static_cast<long long>(ranks);
  if (!t_group)
    refuse("%s: expected one of %lld ranks on this thread, got no group; start the artifact's ranks "
           "with torchrun --nproc-per-node %lld",
           op, count, count);
  if (t_group->size != ranks)
    refuse("%s: expected a group of %lld ranks from the graph, got one of %d", op, count,
           t_group->size);
  if (t_group->rank < 0 || t_group->rank >= ranks)
    refuse("%s: rank: expected 0 to %lld, got %d", op, count - 1, t_group->rank);
  if (t_group->timeout_ms < 0)
    refuse("%s: timeout_ms: expected at least 0, got %lld", op,
           static_cast<long long>(t_group->timeout_ms));
  require_data(op, "memory", static_cast<const uint64_t*>(t_group->memory), 1);
  return *t_group;
}

}  // namespace

Meeting::Meeting(const char* op, int64_t ranks) : op_(op), group_(entered(op, ranks)) {}

char* Meeting::begin() { return place(group_, group_.calls + 1, group_.rank); }

const char* Meeting::part(int32_t rank) const { return place(group_, group_.calls, rank); }

void Meeting::exchange(size_t bytes) {
  ++group_.calls;
  group_.moved_bytes += bytes;
  if (group_.gather) return gather(bytes);
  Line& own = shared(group_).lines[group_.rank];
  own.bytes[group_.calls & 1].store(bytes, std::memory_order_relaxed);
  own.calls.store(static_cast<uint32_t>(group_.calls));
  if (own.sleepers.load()) wake_all(own.calls);
  for (int32_t rank = 0; rank < group_.size; ++rank)
    if (rank != group_.rank) wait_for(rank, bytes);
}

void Meeting::wait_for(int32_t rank, size_t bytes) {
  Shared& all = shared(group_);
  Line& line = all.lines[rank];
  const auto wanted = static_cast<uint32_t>(group_.calls);
  const auto there = [&](uint32_t calls) { return static_cast<int32_t>(calls - wanted) >= 0; };
  uint32_t calls = line.calls.load();
  if (!there(calls)) {
    const auto start = Clock::now();
    const auto deadline = deadline_of(group_, start);
    for (uint32_t turns = 0; !there(calls = line.calls.load()); ++turns) {
      if (const uint32_t broken = all.broken.load())
        fail(static_cast<int32_t>(broken & 0xffff), broken >> 16);
      if (turns % 64 || Clock::now() - start < kSpin) {
        pause_briefly();
        continue;
      }
      // A rank that ended just after it published is not missing.
      if (has_ended(group_, rank) && !there(line.calls.load())) fail(rank, KVG_RANK_ENDED);
      if (Clock::now() > deadline) fail(rank, KVG_RANK_LATE);
      ++line.sleepers;
      if (!there(line.calls.load())) sleep_on(line.calls, calls);
      --line.sleepers;
      turns = 63;  // the next turn checks everything again
    }
    group_.waited_ns += static_cast<uint64_t>(
        std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now() - start).count());
  }
  const uint64_t found = line.bytes[group_.calls & 1].load(std::memory_order_relaxed);
  if (found != bytes)
    refuse("%s: expected %zu bytes from rank %d as of this one, got %llu: the ranks run different "
           "steps",
           op_, bytes, rank, static_cast<unsigned long long>(found));
}

void Meeting::gather(size_t bytes) {
  const auto start = Clock::now();
  const auto deadline = deadline_of(group_, start);
  Heard& heard = shared(group_).heard;
  bool has_told = false;
  const auto ask = [&](int32_t first) {
    return group_.gather(group_.context, place(group_, group_.calls, 0), kPieceBytes, bytes, first);
  };
  int32_t state = ask(1);
  for (; state == KVG_GATHER_WAITS; state = ask(0)) {
    if (const uint32_t broken = heard_of(group_))
      fail(static_cast<int32_t>(broken & 0xffff), broken >> 16);
    const auto now = Clock::now();
    if (!has_told && (now > deadline || heard.waiting.load())) {
      tell_all(group_, kWaiting, static_cast<uint8_t>(group_.calls));
      has_told = true;
    }
    if (now <= deadline) continue;
    const Missing missing = missing_from(group_, heard, group_.calls);
    if (missing.count == 1 || now > deadline + kAnswer)
      fail(missing.first, missing.count ? KVG_RANK_LATE : KVG_RANK_CUT_OFF);
  }
  group_.waited_ns += static_cast<uint64_t>(
      std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now() - start).count());
  heard.waiting.store(0);
  if (state == KVG_GATHER_DONE) return;
  uint32_t broken = heard_of(group_);
  for (const auto last = Clock::now() + kAnswer; !broken && Clock::now() < last;) {
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
    broken = heard_of(group_);
  }
  if (broken) fail(static_cast<int32_t>(broken & 0xffff), broken >> 16);
  fail(group_.rank, KVG_RANK_CUT_OFF);
}

void Meeting::fail(int32_t rank, uint32_t reason) {
  mark_broken(group_, rank, reason);
  if (reason == KVG_RANK_ENDED)
    refuse("%s: expected rank %d of %d to take part, got the end of its process", op_, rank,
           group_.size);
  if (reason == KVG_RANK_LATE)
    refuse("%s: expected rank %d of %d within %.3g s (--collective-timeout), got nothing from it",
           op_, rank, group_.size, static_cast<double>(group_.timeout_ms) / 1e3);
  if (reason == KVG_RANK_CUT_OFF)
    refuse("%s: expected rank %d of %d to reach all others, got a failure of what carries the step",
           op_, rank, group_.size);
  refuse("%s: expected rank %d of %d to take part, got its failure in this step; its own message "
         "says why",
         op_, rank, group_.size);
}

}  // namespace kvg

extern "C" uint64_t kvg_cpu_group_bytes(int32_t size) {
  if (size < 1 || size > KVG_MOST_RANKS) return 0;
  return kvg::kPieces + 2 * static_cast<uint64_t>(size) * kvg::kPieceBytes;
}

extern "C" void kvg_cpu_enter_group(kvg_group* group) { kvg::t_group = group; }

extern "C" void kvg_cpu_abort_group(kvg_group* group) {
  if (kvg::is_whole(group)) kvg::mark_broken(*group, group->rank, KVG_RANK_FAILED);
}

extern "C" uint32_t kvg_cpu_group_broken(kvg_group* group) {
  if (!kvg::is_whole(group)) return 0;
  return group->gather ? kvg::heard_of(*group) : kvg::shared(*group).broken.load();
}
