#include "cuda/modules.h"

#include <algorithm>

namespace kvg::cuda {

// Any function may use this much shared memory; an attribute must allow more first.
constexpr uint32_t kSharedBytesOfAnyFunction = 48 * 1024;

void check_runs(const Driver& driver, const Arch& arch, int32_t min_driver, int32_t ordinal) {
  driver.require(std::max(min_driver, arch.min_driver()), (arch.name + " code").c_str());
  const Device device = driver.device(ordinal);
  const int32_t major = driver.attribute(kMajor, device), minor = driver.attribute(kMinor, device);
  if (!arch.runs_on(major, minor))
    refuse(KVG_DEVICE, "device %d: expected compute capability %d.%d%s for %s code, got %d.%d (sm_%d)",
           ordinal, arch.major, arch.minor, arch.exact ? "" : " or newer of its major",
           arch.name.c_str(), major, minor, 10 * major + minor);
}

Module::Module(Context* context, Device device, DriverModule* handle, const Image& image)
    : context(context),
      device_(device),
      handle_(handle),
      label_(image.arch.name + " image " + shown(image.digest)) {}

DriverFunction* Module::function(const Driver& driver, const char* name, uint32_t shared_bytes) {
  std::lock_guard<std::mutex> lock(mutex_);
  Function& function = find(driver, name);
  if (shared_bytes <= function.shared_bytes) return function.handle;
  const int32_t limit = driver.attribute(kSharedBytesOptIn, device_);
  if (limit < 0 || shared_bytes > static_cast<uint32_t>(limit))
    refuse(KVG_DEVICE, "%s: shared_bytes: expected at most %d of this device, got %u", name, limit,
           shared_bytes);
  // Prefers shared memory to L1 cache, as Triton's loader does: the shared memory that the cache
  // leaves limits the blocks of a multiprocessor.
  driver.check(driver.cuFuncSetCacheConfig(function.handle, kPreferShared), "cuFuncSetCacheConfig");
  driver.check(driver.cuFuncSetAttribute(function.handle, kMaxDynamicShared,
                                         static_cast<int32_t>(shared_bytes)), "cuFuncSetAttribute");
  function.shared_bytes = shared_bytes;
  return function.handle;
}

Module::Function& Module::find(const Driver& driver, const char* name) {
  const auto known = functions_.find(name);
  if (known != functions_.end()) return known->second;
  DriverFunction* handle = nullptr;
  const Result result = driver.cuModuleGetFunction(&handle, handle_, name);
  if (result == kNotFound)
    refuse(KVG_REFUSED, "function: expected a kernel of the %s, got \"%.100s\"", label_.c_str(), name);
  driver.check(result, "cuModuleGetFunction");
  return functions_.emplace(name, Function{handle, kSharedBytesOfAnyFunction}).first->second;
}

uint64_t Modules::load(const kvg_cuda_image& given) {
  const Image image = check_image(given);  // checks that need no driver come first
  const Driver& cuda = driver();
  check_runs(cuda, image.arch, given.min_driver, given.device);
  const Device device = cuda.device(given.device);

  std::lock_guard<std::mutex> lock(loading_);
  Context* const context = context_of(cuda, device);
  const auto known = ids_.find({context, image.digest});
  if (known != ids_.end()) return known->second;
  const Current current(cuda, context);
  DriverModule* handle = nullptr;
  const Result result = cuda.cuModuleLoadData(&handle, given.data);
  if (result == kInvalidImage)
    refuse(KVG_REFUSED, "image: expected a cubin that the driver takes, got the %s image %s, which "
           "it calls damaged (CUDA_ERROR_INVALID_IMAGE)", image.arch.name.c_str(),
           shown(image.digest).c_str());
  cuda.check(result, "cuModuleLoadData");
  {
    std::unique_lock<std::shared_mutex> writing(reading_);
    modules_.emplace_back(context, device, handle, image);
  }
  return ids_[{context, image.digest}] = modules_.size();
}

Module& Modules::at(uint64_t id) {
  std::shared_lock<std::shared_mutex> lock(reading_);
  if (id < 1 || id > modules_.size())
    refuse(KVG_REFUSED, "module: expected one of the %zu modules loaded, got %llu", modules_.size(),
           static_cast<unsigned long long>(id));
  return modules_[id - 1];
}

// The thread's current context if it is on `device`, else the primary context, which the CUDA
// runtime and torch use. The primary context is retained once and never released.
Context* Modules::context_of(const Driver& driver, Device device) {
  Context* current = nullptr;
  driver.check(driver.cuCtxGetCurrent(&current), "cuCtxGetCurrent");
  Device its_device = -1;
  if (current) driver.check(driver.cuCtxGetDevice(&its_device), "cuCtxGetDevice");
  if (current && its_device == device) return current;
  Context*& primary = primary_[device];
  if (!primary)
    driver.check(driver.cuDevicePrimaryCtxRetain(&primary, device), "cuDevicePrimaryCtxRetain");
  return primary;
}

Modules& modules() {
  static Modules& instance = *new Modules;
  return instance;
}

}  // namespace kvg::cuda
