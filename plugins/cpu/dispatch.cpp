#include "cpu/kernels.h"

namespace kvg {

namespace baseline {
extern const Kernels kKernels;
}
#if defined(KVG_HAS_AVX512)
namespace avx512 {
extern const Kernels kKernels;
}
#endif

const Kernels& kernels() {
#if defined(KVG_HAS_AVX512)
  static const bool wide = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  if (wide) return avx512::kKernels;
#endif
  return baseline::kKernels;
}

}  // namespace kvg
