#include "cpu/lifelines.h"

#include <cerrno>

#include <sys/socket.h>

namespace kvg {
namespace {

constexpr int kSend = MSG_DONTWAIT
#if defined(MSG_NOSIGNAL)
                      | MSG_NOSIGNAL
#endif
    ;

bool is_other(const kvg_group& group, int32_t rank) {
  return rank != group.rank && group.exits && group.exits[rank] >= 0;
}

}  // namespace

void tell_all(const kvg_group& group, uint8_t what, uint8_t of) {
  const uint8_t said[2] = {what, of};
  for (int32_t rank = 0; rank < group.size; ++rank)
    if (is_other(group, rank)) (void)!send(group.exits[rank], said, sizeof said, kSend);
}

uint32_t listen_to_all(const kvg_group& group, Heard& heard) {
  uint32_t ended = 0;
  for (int32_t rank = 0; rank < group.size; ++rank) {
    while (is_other(group, rank)) {
      uint8_t said[2];
      const ssize_t count = recv(group.exits[rank], said, sizeof said, MSG_DONTWAIT | MSG_PEEK);
      if (count < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR)) break;
      if (count <= 0) {
        ended = KVG_RANK_ENDED << 16 | static_cast<uint32_t>(rank);
        break;
      }
      if (count < 2) break;  // the second byte has not arrived yet
      (void)!recv(group.exits[rank], said, sizeof said, MSG_DONTWAIT);
      // A message counts more than the end of a rank, which may have ended because of what it says.
      if (said[0] != kWaiting) return static_cast<uint32_t>(said[0]) << 16 | said[1];
      heard.at[rank].store(said[1]);
      heard.waiting |= uint64_t{1} << rank;
    }
  }
  return ended;
}

Missing missing_from(const kvg_group& group, const Heard& heard, uint64_t call) {
  Missing found = {0, group.rank};
  for (int32_t rank = group.size - 1; rank >= 0; --rank) {
    const bool waits = heard.waiting.load() >> rank & 1;
    if (rank == group.rank || (waits && heard.at[rank].load() == (call & 0xff))) continue;
    ++found.count;
    found.first = rank;
  }
  return found;
}

}  // namespace kvg
