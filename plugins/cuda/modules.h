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

// An image that is loaded into a context. It is never unloaded, because a stream may still run it.
class Module {
 public:
  Module(Context* context, Device device, DriverModule* handle, const Image& image);

  // Finds the function of that name and allows it `shared_bytes` of dynamic shared memory.
  DriverFunction* function(const Driver& driver, const char* name, uint32_t shared_bytes);

  Context* const context;

 private:
  struct Function {
    DriverFunction* handle;
    uint32_t shared_bytes;  // dynamic shared memory that it is allowed so far
  };
  Function& find(const Driver& driver, const char* name);

  const Device device_;
  DriverModule* const handle_;
  const std::string label_;
  std::mutex mutex_;  // guards functions_
  std::map<std::string, Function, std::less<>> functions_;
};

class Modules {
 public:
  uint64_t load(const kvg_cuda_image& image);
  Module& at(uint64_t id);

 private:
  Context* context_of(const Driver& driver, Device device);

  std::mutex loading_;         // held while an image is loaded, so that it is loaded once
  std::shared_mutex reading_;  // guards modules_; held briefly: launches do not wait for a load
  std::deque<Module> modules_;  // indexed by id - 1; a deque, so that a Module never moves
  std::map<std::pair<Context*, Digest>, uint64_t> ids_;
  std::map<Device, Context*> primary_;
};

// The modules of this process. Never destroyed: at exit, the driver may be gone before them.
Modules& modules();

// Refuses unless first the driver, then the device's compute capability can run code for `arch`.
void check_runs(const Driver& driver, const Arch& arch, int32_t min_driver, int32_t ordinal);

}  // namespace kvg::cuda
