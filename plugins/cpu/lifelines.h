// Messages of two bytes between ranks of several hosts, on the sockets between them: a
// kvg_group_fault and a rank, or kWaiting and a piece. A closed socket is the end of its rank.
#pragma once

#include <atomic>
#include <cstdint>

#include "kvgraph/abi.h"

namespace kvg {

// A message besides kvg_group_fault: the sender waits for the piece of this number (lowest 8 bits).
constexpr uint8_t kWaiting = 16;

// The kWaiting messages that a process has received.
struct Heard {
  std::atomic<uint64_t> waiting;           // bit i: rank i has sent one
  std::atomic<uint8_t> at[KVG_MOST_RANKS];  // the piece that rank i waits for
};

void tell_all(const kvg_group& group, uint8_t what, uint8_t of);

// Reads the messages that have arrived. Returns why the group fails, as kvg_cpu_group_broken does;
// 0: it does not.
uint32_t listen_to_all(const kvg_group& group, Heard& heard);

struct Missing {
  int32_t count, first;
};

// The other ranks that have not said that they wait for piece `call`: their number, and the first.
Missing missing_from(const kvg_group& group, const Heard& heard, uint64_t call);

}  // namespace kvg
