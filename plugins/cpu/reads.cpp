#include "cpu/reads.h"

#if defined(__linux__)
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#endif

namespace kvg {
#if defined(__linux__)
namespace {

// Calls after the last read for which more are expected: some tokens of a model. Few if the system
// does not say what is missing, since requests for what is in memory take longer than to ask.
constexpr int64_t kTold = 256, kUntold = 32;
constexpr int64_t kRows = 8;  // from one look to the next, which takes 2 us
constexpr uintptr_t kLeastPage = 4096;
// Linux reads no more for one request than it reads ahead by itself, by default 128 KiB.
constexpr uintptr_t kRequest = 128 << 10;

// Whether a page of [at, at + bytes), at most kRequest, is not in memory. The system says no for a
// file that the process neither owns nor may write to: mincore(2).
bool is_missing(void* at, size_t bytes, uintptr_t page) {
  unsigned char found[kRequest / kLeastPage];
  if (mincore(at, bytes, found)) return false;
  const size_t count = (bytes + page - 1) / page;
  return std::any_of(found, found + count, [](unsigned char each) { return !(each & 1); });
}

}  // namespace

bool Reads::expected(int64_t rows) {
  if (left_ > 0) --left_;
  if ((rows_ += rows) >= kRows) look();
  return left_ > 0;
}

void Reads::look() {
  rows_ = 0;
  rusage now = {};
  getrusage(RUSAGE_SELF, &now);
  const bool has_waited = now.ru_majflt != waits_, has_read = now.ru_inblock != blocks_;
  waits_ = now.ru_majflt, blocks_ = now.ru_inblock;
  const bool has_found = !is_told_ && has_read && left_ > 0;
  if (has_waited || has_found) left_ = is_told_ ? kTold : kUntold;
}

void Reads::start(const void* from, int64_t bytes) {
  if (!from) return;
  static const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  const auto first = reinterpret_cast<uintptr_t>(from);
  const uintptr_t end = first + static_cast<uintptr_t>(bytes);
  for (uintptr_t at = first / page * page; at < end; at += kRequest) {
    auto* const place = reinterpret_cast<void*>(at);
    const size_t size = std::min(kRequest, end - at);
    if (is_missing(place, size, page))
      left_ = kTold, is_told_ = true;
    else if (is_told_)
      continue;
    madvise(place, size, MADV_WILLNEED);
  }
}
#else
bool Reads::expected(int64_t) { return false; }
void Reads::look() {}
void Reads::start(const void*, int64_t) {}
#endif

}  // namespace kvg
