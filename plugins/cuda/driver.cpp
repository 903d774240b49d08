#include "cuda/driver.h"

#include <dlfcn.h>

#include <atomic>
#include <memory>
#include <mutex>

namespace kvg::cuda {
namespace {

constexpr char kLibrary[] = "libcuda.so.1";

std::mutex g_mutex;
std::atomic<const Driver*> g_driver{nullptr};  // never freed: streams outlive static destructors
std::atomic<bool> g_initialised{false};

template <class Function>
void find(void* library, const char* name, Function& function) {
  function = reinterpret_cast<Function>(dlsym(library, name));
  if (!function)
    refuse(KVG_DEVICE, "%s: expected the entry point %s, got none: update the NVIDIA driver",
           kLibrary, name);
}

constexpr char kStartAgain[] = "; nothing runs on this device in this process any more: start it again";

// Errors after which every call in the context fails (CUDA driver API, CUresult: "the process must be
// terminated and relaunched"): from ECC and illegal accesses to failed launches.
bool ends_the_context(Result result) {
  constexpr Result kEnding[] = {214, 220, 700, 702, 710, 714, 715, 716, 717, 718, 719, 721};
  for (const Result each : kEnding)
    if (result == each) return true;
  return false;
}

const Driver* open() {
  void* library = dlopen(kLibrary, RTLD_NOW | RTLD_LOCAL);
  if (!library) {
    const char* reason = dlerror();
    refuse(KVG_DEVICE, "%s: expected an NVIDIA driver on this machine, got none (%s)", kLibrary,
           reason ? reason : "no reason given");
  }
  auto driver = std::make_unique<Driver>();
#define KVG_FIND(name, signature) find(library, #name, driver->name);
  KVG_DRIVER_ENTRIES(KVG_FIND)
#undef KVG_FIND
  return driver.release();
}

}  // namespace

const Driver& found_driver() {
  if (const Driver* known = g_driver.load(std::memory_order_acquire)) return *known;
  std::lock_guard<std::mutex> lock(g_mutex);
  if (!g_driver.load()) g_driver.store(open(), std::memory_order_release);
  return *g_driver.load();
}

const Driver& driver() {
  const Driver& cuda = found_driver();
  if (!g_initialised.load(std::memory_order_acquire)) {
    cuda.check(cuda.cuInit(0), "cuInit");
    g_initialised.store(true, std::memory_order_release);
  }
  return cuda;
}

void Driver::check(Result result, const char* call) const {
  if (result == 0) return;
  const char *name = nullptr, *text = nullptr;
  if (cuGetErrorName(result, &name) != 0 || !name) name = "an unknown error";
  if (cuGetErrorString(result, &text) != 0 || !text) text = "no description";
  refuse(KVG_DEVICE, "%s: expected success of the CUDA driver, got %s (%d): %s%s", call, name, result,
         text, ends_the_context(result) ? kStartAgain : "");
}

int32_t Driver::version() const {
  int32_t version = 0;
  check(cuDriverGetVersion(&version), "cuDriverGetVersion");
  return version;
}

void Driver::require(int32_t min_version, const char* for_what) const {
  const int32_t found = version();
  if (found < min_version)
    refuse(KVG_DEVICE, "%s: expected a driver for CUDA %d.%d or newer for %s, got one for %d.%d",
           kLibrary, min_version / 1000, min_version % 1000 / 10, for_what, found / 1000,
           found % 1000 / 10);
}

int32_t Driver::device_count() const {
  int32_t count = 0;
  check(cuDeviceGetCount(&count), "cuDeviceGetCount");
  return count;
}

Device Driver::device(int32_t ordinal) const {
  const int32_t count = device_count();
  if (ordinal < 0 || ordinal >= count)
    refuse(KVG_DEVICE, "device: expected one of the %d CUDA devices of this machine, got %d", count,
           ordinal);
  Device device = 0;
  check(cuDeviceGet(&device, ordinal), "cuDeviceGet");
  return device;
}

int32_t Driver::attribute(DeviceAttribute which, Device device) const {
  int32_t value = 0;
  check(cuDeviceGetAttribute(&value, which, device), "cuDeviceGetAttribute");
  return value;
}

Current::Current(const Driver& driver, Context* context) : driver_(driver) {
  Context* current = nullptr;
  driver_.check(driver_.cuCtxGetCurrent(&current), "cuCtxGetCurrent");
  if (current == context) return;
  driver_.check(driver_.cuCtxPushCurrent_v2(context), "cuCtxPushCurrent");
  pushed_ = true;
}

Current::~Current() {
  Context* popped = nullptr;
  if (pushed_) driver_.cuCtxPopCurrent_v2(&popped);
}

}  // namespace kvg::cuda
