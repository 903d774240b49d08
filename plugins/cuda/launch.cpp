// The entry points of launch.h for devices, images and launches; those for plans are in
// launch/library.cpp.
#include "kvgraph/launch.h"

#include "cuda/frame.h"
#include "cuda/modules.h"

namespace kvg::cuda {
namespace {

constexpr uint32_t kMaxGrid[3] = {2147483647u, 65535u, 65535u};  // on every architecture
constexpr uint32_t kMaxWarps = 32, kWarp = 32;

const char* named(const char* function) {
  if (!function || !*function) refuse(KVG_REFUSED, "function: expected a name, got none");
  return function;
}

void check_shape(const kvg_launch& launch) {
  for (int axis = 0; axis < 3; ++axis)
    if (launch.grid[axis] < 1 || launch.grid[axis] > kMaxGrid[axis])
      refuse(KVG_REFUSED, "%s: grid: dim %d: expected 1 to %u blocks, got %u", launch.function, axis,
             kMaxGrid[axis], launch.grid[axis]);
  if (launch.num_warps < 1 || launch.num_warps > kMaxWarps)
    refuse(KVG_REFUSED, "%s: num_warps: expected 1 to %u, got %u", launch.function, kMaxWarps,
           launch.num_warps);
  for (int axis = 0; axis < 3; ++axis)
    if (launch.cluster[axis] > 1)
      refuse(KVG_REFUSED, "%s: cluster: dim %d: expected 0 or 1, got %u", launch.function, axis,
             launch.cluster[axis]);
}

void check_argument(const kvg_launch& launch, uint32_t index) {
  const kvg_argument& given = launch.arguments[index];
  if (given.kind < KVG_ARGUMENT_POINTER || given.kind > KVG_ARGUMENT_FLOAT32)
    refuse(KVG_REFUSED, "%s: argument %u: expected a kind of 1 to 4, got %u", launch.function, index,
           given.kind);
  if (given.kind == KVG_ARGUMENT_POINTER && given.alignment &&
      given.value.pointer % given.alignment)
    refuse(KVG_REFUSED, "%s: argument %u: expected an address that is a multiple of %u, got 0x%llx",
           launch.function, index, given.alignment,
           static_cast<unsigned long long>(given.value.pointer));
}

// Addresses of the arguments for the driver, which knows their sizes from the kernel. A value of
// any kind is at the start of its union. Null scratch pointers come last.
struct Parameters {
  void* at[KVG_MAX_LAUNCH_ARGUMENTS + 2];
  uint64_t scratch = 0;

  explicit Parameters(const kvg_launch& launch) {
    const uint32_t count = launch.num_arguments;
    if (count > KVG_MAX_LAUNCH_ARGUMENTS || (count && !launch.arguments))
      refuse(KVG_REFUSED, "%s: expected at most %d arguments, got %u%s", launch.function,
             KVG_MAX_LAUNCH_ARGUMENTS, count, launch.arguments ? "" : " at a null pointer");
    for (uint32_t i = 0; i < count; ++i) {
      check_argument(launch, i);
      at[i] = const_cast<void*>(static_cast<const void*>(&launch.arguments[i].value));
    }
    at[count] = at[count + 1] = &scratch;
  }
};

void launch_kernel(const kvg_launch& launch) {
  named(launch.function);
  check_shape(launch);
  Parameters parameters(launch);
  Module& module = modules().at(launch.module);
  const Driver& cuda = driver();
  const Current current(cuda, module.context);
  DriverFunction* function = module.function(cuda, launch.function, launch.shared_bytes);
  const uint32_t* g = launch.grid;
  cuda.check(cuda.cuLaunchKernel(function, g[0], g[1], g[2], launch.num_warps * kWarp, 1, 1,
                                 launch.shared_bytes, static_cast<Stream*>(launch.stream),
                                 parameters.at, nullptr),
             launch.function);
}

void describe(kvg_cuda_device& given) {
  const Driver& cuda = driver();
  const Device device = cuda.device(given.ordinal);
  given.major = cuda.attribute(kMajor, device);
  given.minor = cuda.attribute(kMinor, device);
  given.multiprocessors = cuda.attribute(kMultiprocessors, device);
  given.shared_bytes = cuda.attribute(kSharedBytesOptIn, device);
}

// A machine with a driver but no device has 0 devices, which is not an error.
int32_t count_devices() {
  const Driver& found = found_driver();
  const Result result = found.cuInit(0);
  if (result == kNoDevice) return 0;
  found.check(result, "cuInit");
  return found.device_count();
}

template <class T>
T& out(T* pointer, const char* name) {
  if (!pointer) refuse(KVG_REFUSED, "%s: expected where to write it, got a null pointer", name);
  return *pointer;
}

}  // namespace
}  // namespace kvg::cuda

using namespace kvg::cuda;
using kvg::entry;

extern "C" {

uint32_t kvg_cuda_abi_version(void) { return KVG_LAUNCH_ABI_VERSION; }

int32_t kvg_cuda_device_count(int32_t* count, char* message, size_t message_size) {
  return entry(message, message_size, [&] { out(count, "count") = count_devices(); });
}

int32_t kvg_cuda_describe(kvg_cuda_device* device, char* message, size_t message_size) {
  return entry(message, message_size, [&] {
    check_frame("device", device);
    describe(*device);
  });
}

int32_t kvg_cuda_check_arch(const char* arch, int32_t ordinal, char* message, size_t message_size) {
  return entry(message, message_size, [&] {
    const Arch parsed = parse_arch(arch);
    check_runs(driver(), parsed, 0, ordinal);
  });
}

int32_t kvg_cuda_load(const kvg_cuda_image* image, uint64_t* module, char* message,
                      size_t message_size) {
  return entry(message, message_size, [&] {
    check_frame("image", image);
    out(module, "module") = modules().load(*image);
  });
}

int32_t kvg_cuda_prepare(uint64_t module, const char* function, uint32_t shared_bytes,
                         char* message, size_t message_size) {
  return entry(message, message_size, [&] {
    const char* name = named(function);
    Module& loaded = modules().at(module);
    const Driver& cuda = driver();
    const Current current(cuda, loaded.context);
    loaded.function(cuda, name, shared_bytes);
  });
}

int32_t kvg_cuda_launch(const kvg_launch* launch, char* message, size_t message_size) {
  return entry(message, message_size, [&] {
    check_frame("launch", launch);
    launch_kernel(*launch);
  });
}

}  // extern "C"
