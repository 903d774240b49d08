// all_reduce and all_gather of a group's ranks: every rank publishes its part once and reads all
// parts. Parts are added in the order of the ranks, so that all ranks have the same bits.
#include <algorithm>
#include <cstring>

#include "cpu/check.h"
#include "cpu/group.h"
#include "cpu/kernels.h"
#include "cpu/parallel.h"

namespace kvg {
namespace {

constexpr size_t kBlock = 512;           // elements that are added at a time
constexpr size_t kBlocksPerTask = 32;    // fewer would be added before another thread wakes up

// Adds the ranks' parts, and the residual, of up to kBlock elements from `at` on.
void add(const Meeting& meeting, const Dtype& type, size_t at, size_t count, const char* residual,
         char* out) {
  float sum[kBlock], part[kBlock];
  type.to_float(meeting.part(0) + at * type.size, sum, count);
  for (int32_t rank = 1; rank < meeting.size(); ++rank) {
    type.to_float(meeting.part(rank) + at * type.size, part, count);
    for (size_t i = 0; i < count; ++i) sum[i] += part[i];
  }
  if (residual) {
    type.to_float(residual + at * type.size, part, count);
    for (size_t i = 0; i < count; ++i) sum[i] += part[i];
  }
  type.from_float(sum, out + at * type.size, count);
}

int64_t ranks_of(const Operands& in, int attribute) {
  const int64_t ranks = in.integer(attribute);
  if (ranks < 1 || ranks > KVG_MOST_RANKS)
    refuse("%s: ranks: expected 1 to %d, got %lld", in.op.name, KVG_MOST_RANKS,
           static_cast<long long>(ranks));
  return ranks;
}

void reduce(const Operands& in) {
  const Dtype& type = dtype(in.dtype(KVG_ALL_REDUCE_X));
  const char* x = in.data<const char>(KVG_ALL_REDUCE_X);
  const char* residual = in.data<const char>(KVG_ALL_REDUCE_RESIDUAL);
  char* out = in.data<char>(KVG_ALL_REDUCE_OUT);
  size_t left = static_cast<size_t>(in.dims[KVG_DIM_ROWS] * in.dims[KVG_DIM_WIDTH]);
  Meeting meeting("all_reduce", ranks_of(in, KVG_ALL_REDUCE_ATTR_RANKS));
  const size_t piece = kPieceBytes / type.size;
  for (size_t count; left; left -= count) {
    count = std::min(left, piece);
    std::memcpy(meeting.begin(), x, count * type.size);
    meeting.exchange(count * type.size);
    const size_t tasks = (count + kBlock * kBlocksPerTask - 1) / (kBlock * kBlocksPerTask);
    parallel_for(in.call, tasks, [&](size_t task) {
      const size_t first = task * kBlock * kBlocksPerTask;
      const size_t end = std::min(count, first + kBlock * kBlocksPerTask);
      for (size_t at = first; at < end; at += kBlock)
        add(meeting, type, at, std::min(kBlock, end - at), residual, out);
    });
    x += count * type.size;
    out += count * type.size;
    if (residual) residual += count * type.size;
  }
}

void gather(const Operands& in) {
  const size_t size = dtype(in.dtype(KVG_ALL_GATHER_X)).size;
  const char* x = in.data<const char>(KVG_ALL_GATHER_X);
  char* out = in.data<char>(KVG_ALL_GATHER_OUT);
  const size_t width = static_cast<size_t>(in.dims[KVG_DIM_WIDTH]) * size;  // bytes of a row
  const size_t total = static_cast<size_t>(in.dims[KVG_DIM_ROWS]) * width;
  Meeting meeting("all_gather", ranks_of(in, KVG_ALL_GATHER_ATTR_RANKS));
  const size_t ranks = static_cast<size_t>(meeting.size());
  for (size_t done = 0, bytes; done < total; done += bytes) {
    bytes = std::min(total - done, kPieceBytes);
    std::memcpy(meeting.begin(), x + done, bytes);
    meeting.exchange(bytes);
    for (size_t rank = 0; rank < ranks; ++rank) {
      const char* part = meeting.part(static_cast<int32_t>(rank));
      for (size_t at = done, run; at < done + bytes; at += run) {
        const size_t row = at / width, column = at % width;
        run = std::min(width - column, done + bytes - at);
        std::memcpy(out + (row * ranks + rank) * width + column, part + (at - done), run);
      }
    }
  }
}

}  // namespace
}  // namespace kvg

extern "C" int32_t kvg_cpu_all_reduce(const kvg_call* call, char* message, size_t message_size) {
  using namespace kvg;
  return entry(message, message_size, [&] { reduce(check(KVG_OP_ALL_REDUCE, call)); });
}

extern "C" int32_t kvg_cpu_all_gather(const kvg_call* call, char* message, size_t message_size) {
  using namespace kvg;
  return entry(message, message_size, [&] {
    const Operands in = check(KVG_OP_ALL_GATHER, call);
    const int64_t expected = in.dims[KVG_DIM_WIDTH] * ranks_of(in, KVG_ALL_GATHER_ATTR_RANKS);
    if (in.dims[KVG_DIM_OUT_WIDTH] != expected)
      refuse("all_gather: out_width: expected %lld, the width of x times its ranks, got %lld",
             static_cast<long long>(expected), static_cast<long long>(in.dims[KVG_DIM_OUT_WIDTH]));
    gather(in);
  });
}
