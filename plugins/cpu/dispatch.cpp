// Which instruction set's kernels this process runs.
#include <cstdlib>
#include <string>

#include "cpu/check.h"
#include "cpu/kernels.h"
#include "kvgraph/abi.h"

namespace kvg {

#if defined(KVG_X86)
namespace avx2 {
extern const Kernels kKernels;
}
namespace avx512 {
extern const Kernels kKernels;
}
namespace avx512_bf16 {
extern const Kernels kKernels;
}
#else
namespace baseline {
extern const Kernels kKernels;
}
#endif

namespace {

struct Isa {
  const Kernels& kernels;
  bool runs;  // on this processor
};

const Kernels& choose() {
#if defined(KVG_X86)
  const bool wide = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                    __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512cd") &&
                    __builtin_cpu_supports("avx512vl");
  const Isa all[] = {{avx512_bf16::kKernels, wide && __builtin_cpu_supports("avx512bf16")},
                     {avx512::kKernels, wide},
                     {avx2::kKernels, true}};
#else
  const Isa all[] = {{baseline::kKernels, true}};
#endif
  const char* wanted = std::getenv("KVGRAPH_CPU_ISA");
  std::string runs, known;
  const Isa* found = nullptr;
  for (const Isa& isa : all) {
    const std::string name = isa.kernels.name;
    known += (known.empty() ? "" : ", ") + name;
    if (isa.runs) runs += (runs.empty() ? "" : ", ") + name;
    if (wanted && *wanted ? name == wanted : isa.runs && !found) found = &isa;
  }
  if (!found) refuse("KVGRAPH_CPU_ISA: expected one of %s, got %s", known.c_str(), wanted);
  if (!found->runs)
    refuse("KVGRAPH_CPU_ISA: expected one of %s of this processor, got %s", runs.c_str(), wanted);
  return found->kernels;
}

}  // namespace

const Kernels& kernels() {
  static const Kernels& chosen = choose();
  return chosen;
}

}  // namespace kvg

extern "C" const char* kvg_cpu_isa(void) {
  try {
    return kvg::kernels().name;
  } catch (const kvg::Refusal&) {
    return "";
  }
}
