// The images that this process has loaded, once per context, and their functions.
#pragma once

#include <deque>
#include <map>
#include <mutex>
#include <shared_mutex>
#include <string>
#include <utility>

#include "cuda/driver.h"
#include "cuda/image.h"

namespace kvg::cuda {

// One image in one context. Never unloaded: a stream may still run it.
class Module {
 public:
  Module(Context* context, Device device, DriverModule* handle, const Image& image);

  // The function of that name, allowed `shared_bytes` of dynamic shared memory.
  DriverFunction* function(const Driver& driver, const char* name, uint32_t shared_bytes);

  Context* const context;

 private:
  struct Function {
    DriverFunction* handle;
    uint32_t shared_bytes;  // that it is allowed so far
  };
  Function& find(const Driver& driver, const char* name);

  const Device device_;
  DriverModule* const handle_;
  const std::string label_;
  std::mutex mutex_;  // of functions_
  std::map<std::string, Function, std::less<>> functions_;
};

class Modules {
 public:
  uint64_t load(const kvg_cuda_image& image);
  Module& at(uint64_t id);

 private:
  Context* context_of(const Driver& driver, Device device);

  std::mutex loading_;         // held while an image is loaded, so that it is loaded once
  std::shared_mutex reading_;  // of modules_, held for moments: launches do not wait for a load
  std::deque<Module> modules_;  // id - 1; a deque, so that a Module stays where it is
  std::map<std::pair<Context*, Digest>, uint64_t> ids_;
  std::map<Device, Context*> primary_;
};

// The process's. Never destroyed: the driver may be gone by then.
Modules& modules();

// Refuses where an image for `arch` cannot run on the device: driver first, then capability.
void check_runs(const Driver& driver, const Arch& arch, int32_t min_driver, int32_t ordinal);

}  // namespace kvg::cuda
