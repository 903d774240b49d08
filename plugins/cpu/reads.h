// Weights in a mapped file that are not in memory: what a call needs of them is read at once, and
// nothing else.
//
// Where a page is missing, the system reads its neighbours too, up to 8 MiB on some disks. In a
// mixture these are experts that no token chose. If the model is larger than memory, they take
// the place of experts that are used all the time.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kvg {

// What the calls of an op on one thread know of such weights.
class Reads {
 public:
  Reads() { look(), left_ = 0; }  // what the thread waited for before was something else

  // Whether weights may be missing. Ask once in each call of the op, which has so many rows. True
  // soon after this thread, which does its share of all calls, waited for a page of a file, until
  // weights have been in memory for many calls.
  bool expected(int64_t rows);

  // Starts to read what is missing of [from, from + bytes), and does not wait for it. `from` may be
  // null.
  void start(const void* from, int64_t bytes);

 private:
  void look();
  void start_pages(uintptr_t at, size_t bytes, uintptr_t page);

  int64_t rows_ = 0;                // since the last look
  int64_t waits_ = 0, blocks_ = 0;  // waits for pages of files, and blocks read, of the thread
  int64_t left_ = 0;                // calls for which reads are expected
  bool is_told_ = false;            // the system says which pages are missing
};

}  // namespace kvg
