// What ranks of several hosts tell each other on the sockets between them: two bytes, what and of
// whom. A socket that ends is the end of its rank.
#pragma once

#include <atomic>
#include <cstdint>

#include "kvgraph/abi.h"

namespace kvg {

// Beyond kvg_group_fault: waits in the collective of this number (its lowest 8 bits).
constexpr uint8_t kWaiting = 16;

// Of one process: what it has heard.
struct Heard {
  std::atomic<uint64_t> waiting;           // bit i: rank i has said so
  std::atomic<uint8_t> at[KVG_MOST_RANKS];  // where
};

void tell_all(const kvg_group& group, uint8_t what, uint8_t of);

// Reads what has come. Why the group fails, as kvg_cpu_group_broken has it; 0: it does not.
uint32_t listen_to_all(const kvg_group& group, Heard& heard);

struct Missing {
  int32_t count, first;
};

// The other ranks that have not said that they wait in collective `call`.
Missing missing_from(const kvg_group& group, const Heard& heard, uint64_t call);

}  // namespace kvg
