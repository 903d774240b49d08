// Exchange between ranks: every rank publishes pieces of data that all ranks read, in shared memory
// of one machine, or through the caller's `gather`.
#pragma once

#include <cstddef>
#include <cstdint>

#include "kvgraph/abi.h"

namespace kvg {

constexpr size_t kPieceBytes = 256 << 10;  // most bytes of one rank at a time

// One collective of the calling thread's group. Pieces alternate between two places: a rank that
// writes piece k + 2 has seen all others publish k + 1, so all of them have read piece k.
class Meeting {
 public:
  // Refuses unless the thread has entered a group of `ranks` ranks.
  Meeting(const char* op, int64_t ranks);

  int32_t size() const { return group_.size; }
  // Address at which this rank writes its part of the next piece.
  char* begin();
  // Publishes `bytes` of that part, and waits until all ranks have published as many.
  void exchange(size_t bytes);
  // A rank's part of the piece that was exchanged last.
  const char* part(int32_t rank) const;

 private:
  void wait_for(int32_t rank, size_t bytes);
  void gather(size_t bytes);
  [[noreturn]] void fail(int32_t rank, uint32_t reason);

  const char* op_;
  kvg_group& group_;
};

}  // namespace kvg
