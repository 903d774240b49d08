#include "cpu/amx.h"

#if defined(KVG_X86) && defined(__linux__) && !defined(KVG_EMULATE_AMX)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace kvg {

#if defined(KVG_EMULATE_AMX)

bool amx_runs() { return true; }

#elif defined(KVG_X86) && defined(__linux__)

bool amx_runs() {
  constexpr unsigned kBfloat16 = 1u << 22, kTile = 1u << 24, kInt8 = 1u << 25;
  constexpr unsigned kAll = kBfloat16 | kTile | kInt8;
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d & kAll) != kAll) return false;
  // The permission is for the process and its later threads. Linux before 5.16 refuses it.
  constexpr long kRequestPermission = 0x1023, kTileData = 18;
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

#else

bool amx_runs() { return false; }  // tiles are supported on Linux on x86 only

#endif

}  // namespace kvg
