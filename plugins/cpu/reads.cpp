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

// Calls for which reads are expected: some tokens of a model after something was missing, and few
// after the thread waited for a page, which may be one of something else. The system is asked in
// each of them, 14 to 32 us for 4 experts of 0.8 MB.
constexpr int64_t kAfterMissing = 256, kAfterWait = 32;
constexpr int64_t kRows = 8;  // from one look to the next, which takes 2 us
constexpr uintptr_t kLeastPage = 4096;
// Linux reads no more for one request than it reads ahead by itself, by default 128 KiB. It is asked
// for more at once what is missing.
constexpr uintptr_t kRequest = 128 << 10, kQuestion = 4 << 20;

}  // namespace

bool Reads::expected(int64_t rows) {
  if (left_ > 0) --left_;
  if ((rows_ += rows) >= kRows) look();
  return left_ > 0;
}

void Reads::look() {
  rows_ = 0;
  rusage now = {};
  getrusage(RUSAGE_THREAD, &now);  // of the process: hundreds of us where processors are shared
  const bool has_waited = now.ru_majflt != waits_, has_read = now.ru_inblock != blocks_;
  waits_ = now.ru_majflt, blocks_ = now.ru_inblock;
  const bool has_found = !is_told_ && has_read && left_ > 0;
  if (has_waited || has_found) left_ = std::max(left_, kAfterWait);
}

void Reads::start(const void* from, int64_t bytes) {
  if (!from) return;
  static const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  const auto first = reinterpret_cast<uintptr_t>(from);
  const uintptr_t end = first + static_cast<uintptr_t>(bytes);
  for (uintptr_t at = first / page * page; at < end; at += kQuestion)
    start_pages(at, std::min(kQuestion, end - at), page);
}

// Does so for whole pages, kQuestion at most. The system says that nothing is missing of a file
// that the process neither owns nor may write to: mincore(2).
void Reads::start_pages(uintptr_t at, size_t bytes, uintptr_t page) {
  unsigned char found[kQuestion / kLeastPage];
  const bool is_answered = mincore(reinterpret_cast<void*>(at), bytes, found) == 0;
  const auto is_missing = [](unsigned char each) { return !(each & 1); };
  for (size_t done = 0; done < bytes; done += kRequest) {
    const size_t size = std::min<size_t>(kRequest, bytes - done);
    const unsigned char* pages = found + done / page;
    if (is_answered && std::any_of(pages, pages + (size + page - 1) / page, is_missing))
      left_ = kAfterMissing, is_told_ = true;
    else if (is_told_)
      continue;
    madvise(reinterpret_cast<void*>(at + done), size, MADV_WILLNEED);
  }
}
#else
bool Reads::expected(int64_t) { return false; }
void Reads::look() {}
void Reads::start(const void*, int64_t) {}
#endif

}  // namespace kvg
