// The part of the CUDA driver API that kvgraph uses, declared by us from its documentation. Entry
// points never change their signatures; a new version gets a new name (_v2).
#pragma once

#include <cstddef>
#include <cstdint>

#include "common/base.h"

namespace kvg::cuda {

using Result = int32_t;  // 0: done
using Device = int32_t;
struct Context;
struct DriverModule;
struct DriverFunction;
struct Stream;

constexpr Result kNoDevice = 100, kInvalidImage = 200, kNotFound = 500;

enum DeviceAttribute : int32_t {
  kMultiprocessors = 16,
  kMajor = 75,
  kMinor = 76,
  kSharedBytesOptIn = 97,
};
enum FunctionAttribute : int32_t { kMaxDynamicShared = 8 };
constexpr int32_t kPreferShared = 1;  // CUfunc_cache

// The entry points by their exported names.
#define KVG_DRIVER_ENTRIES(X)                                                                     \
  X(cuInit, (uint32_t))                                                                           \
  X(cuDriverGetVersion, (int32_t*))                                                               \
  X(cuGetErrorName, (Result, const char**))                                                       \
  X(cuGetErrorString, (Result, const char**))                                                     \
  X(cuDeviceGetCount, (int32_t*))                                                                 \
  X(cuDeviceGet, (Device*, int32_t))                                                              \
  X(cuDeviceGetAttribute, (int32_t*, DeviceAttribute, Device))                                    \
  X(cuDevicePrimaryCtxRetain, (Context**, Device))                                                \
  X(cuCtxGetCurrent, (Context**))                                                                 \
  X(cuCtxGetDevice, (Device*))                                                                    \
  X(cuCtxPushCurrent_v2, (Context*))                                                              \
  X(cuCtxPopCurrent_v2, (Context**))                                                              \
  X(cuModuleLoadData, (DriverModule**, const void*))                                              \
  X(cuModuleGetFunction, (DriverFunction**, DriverModule*, const char*))                          \
  X(cuFuncSetAttribute, (DriverFunction*, FunctionAttribute, int32_t))                            \
  X(cuFuncSetCacheConfig, (DriverFunction*, int32_t))                                             \
  X(cuLaunchKernel, (DriverFunction*, uint32_t, uint32_t, uint32_t, uint32_t, uint32_t, uint32_t, \
                     uint32_t, Stream*, void**, void**))

struct Driver {
#define KVG_MEMBER(name, signature) Result(*name) signature = nullptr;
  KVG_DRIVER_ENTRIES(KVG_MEMBER)
#undef KVG_MEMBER

  int32_t version() const;
  int32_t device_count() const;
  Device device(int32_t ordinal) const;
  int32_t attribute(DeviceAttribute which, Device device) const;

  // Refuses if `call` failed, with the driver's name of the error.
  void check(Result result, const char* call) const;
  void require(int32_t min_version, const char* for_what) const;
};

// The driver of this process. The first call that finds it opens it; it is never closed. Refuses if
// there is none.
const Driver& found_driver();
// The same driver, after cuInit.
const Driver& driver();

// Makes `context` current for a scope, if it is not already.
class Current {
 public:
  Current(const Driver& driver, Context* context);
  ~Current();
  Current(const Current&) = delete;
  Current& operator=(const Current&) = delete;

 private:
  const Driver& driver_;
  bool pushed_ = false;
};

}  // namespace kvg::cuda
