// Chooses the instruction set of the kernels that this process runs.
#include <cstdlib>
#include <string>

#include "cpu/amx.h"
#include "cpu/check.h"
#include "cpu/kernels.h"
#include "cpu/linear.h"
#include "kvgraph/abi.h"

namespace kvg {

#if defined(KVG_X86)
namespace avx2 {
extern const Kernels kKernels;
extern const LinearKernels kLinearKernels;
}
namespace avx512 {
extern const Kernels kKernels;
extern const LinearKernels kLinearKernels;
}
namespace avx512_bf16 {
extern const Kernels kKernels;
extern const LinearKernels kLinearKernels;
}
#else
namespace baseline {
extern const Kernels kKernels;
extern const LinearKernels kLinearKernels;
}
#endif

#if defined(KVG_AMX)
namespace amx {
extern const LinearKernels kLinearKernels;
}
#endif

namespace {

struct Isa {
  const char* name;
  const Kernels& kernels;
  const LinearKernels& linear;
  bool (*runs)();  // whether this processor runs it
};

#if defined(KVG_X86)
bool avx512_runs() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512cd") &&
         __builtin_cpu_supports("avx512vl");
}

bool avx512_bf16_runs() {
  return avx512_runs() && __builtin_cpu_supports("avx512bf16") &&
         __builtin_cpu_supports("avx512vnni");
}
#endif

bool always() { return true; }

// All instruction sets, best first.
const Isa kAll[] = {
#if defined(KVG_AMX)
    {"amx", avx512_bf16::kKernels, amx::kLinearKernels,
     [] { return avx512_bf16_runs() && amx_runs(); }},
#endif
#if defined(KVG_X86)
    {"avx512_bf16", avx512_bf16::kKernels, avx512_bf16::kLinearKernels, avx512_bf16_runs},
    {"avx512", avx512::kKernels, avx512::kLinearKernels, avx512_runs},
    {"avx2", avx2::kKernels, avx2::kLinearKernels, always},
#else
    {"baseline", baseline::kKernels, baseline::kLinearKernels, always},
#endif
};

// Names of all instruction sets, or of those that run here, in order.
std::string names(bool that_run) {
  std::string list;
  for (const Isa& isa : kAll)
    if (!that_run || isa.runs()) list += (list.empty() ? "" : ", ") + std::string(isa.name);
  return list;
}

const Isa& choose(const std::string& wanted) {
  for (const Isa& isa : kAll) {
    if ((wanted.empty() || wanted == isa.name) && isa.runs()) return isa;
    if (wanted == isa.name)
      refuse("KVGRAPH_CPU_ISA: expected one of %s of this processor, got %s", names(true).c_str(),
             wanted.c_str());
  }
  refuse("KVGRAPH_CPU_ISA: expected one of %s, got %s", names(false).c_str(), wanted.c_str());
}

const Isa& chosen() {
  static const std::string wanted = [] {  // read once, even if it is refused
    const char* found = std::getenv("KVGRAPH_CPU_ISA");
    return std::string(found ? found : "");
  }();
  static const Isa& isa = choose(wanted);
  return isa;
}

}  // namespace

const Kernels& kernels() { return chosen().kernels; }

const LinearKernels& linear_kernels() { return chosen().linear; }

}  // namespace kvg

extern "C" const char* kvg_cpu_isa(void) {
  try {
    return kvg::chosen().name;
  } catch (const kvg::Refusal&) {
    return "";
  }
}
