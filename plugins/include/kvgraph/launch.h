// The C ABI of the CUDA launcher: cubin images in, kernel launches out, through the driver API that
// is found at run time. Needs no CUDA toolkit, to build or to run; the first call looks for the
// driver, loading this library does not.
//
// Every function returns a kvg_status and on refusal writes one sentence into `message`. All may be
// called from several threads at once. Modules live as long as the process: an image is loaded once
// per context, however many sessions ask for it.
#ifndef KVGRAPH_LAUNCH_H_
#define KVGRAPH_LAUNCH_H_

#include <stddef.h>
#include <stdint.h>

#if defined(_WIN32)
#define KVG_LAUNCH_EXPORT __declspec(dllexport)
#else
#define KVG_LAUNCH_EXPORT __attribute__((visibility("default")))
#endif

#ifdef __cplusplus
extern "C" {
#endif

// Of the structs and functions below; its own number, as ops (abi.h) change more often.
#define KVG_LAUNCH_ABI_VERSION 1
#define KVG_MAX_LAUNCH_ARGUMENTS 62

typedef enum kvg_status {
  KVG_DONE = 0,
  KVG_REFUSED = 1,  // the struct, image or launch is wrong; nothing was done
  KVG_DEVICE = 2,   // the machine cannot: no driver, an old one, another architecture, an error of it
} kvg_status;

// Fields are only ever appended; a struct of a newer caller is longer and is taken.
typedef struct kvg_cuda_device {
  uint32_t abi_version;  // KVG_LAUNCH_ABI_VERSION, set by the caller
  uint32_t struct_size;  // sizeof(kvg_cuda_device), set by the caller
  int32_t ordinal;       // set by the caller
  int32_t major, minor;  // compute capability
  int32_t multiprocessors;
  int32_t shared_bytes;  // that one block may ask for
} kvg_cuda_device;

typedef struct kvg_cuda_image {
  uint32_t abi_version;
  uint32_t struct_size;
  const void* data;       // a cubin; read during the call only
  uint64_t size;          // in bytes
  const char* arch;       // what it was compiled for: "sm_90" runs on 9.x, "sm_90a" on 9.0 alone
  const uint8_t* sha256;  // 32 bytes that the image must hash to; NULL: whatever it is
  int32_t device;         // ordinal. The thread's context if it is of this device, else the primary
  int32_t min_driver;     // 1000 * major + 10 * minor, as the CUDA of its ptxas; 0: as arch needs
} kvg_cuda_image;

typedef enum kvg_argument_kind {
  KVG_ARGUMENT_POINTER = 1,
  KVG_ARGUMENT_INT32 = 2,
  KVG_ARGUMENT_INT64 = 3,
  KVG_ARGUMENT_FLOAT32 = 4,
} kvg_argument_kind;

typedef struct kvg_argument {
  uint32_t kind;
  uint32_t alignment;  // of a pointer: what the kernel was compiled to rely on; 0: nothing
  union {
    uint64_t pointer;
    int32_t i32;
    int64_t i64;
    float f32;
  } value;
} kvg_argument;

// A kernel that Triton compiled takes two more pointers (global and profile scratch) after its own:
// the launcher appends them, as NULL. A block is num_warps * 32 threads.
typedef struct kvg_launch {
  uint32_t abi_version;
  uint32_t struct_size;
  uint64_t module;  // of kvg_cuda_load
  const char* function;
  const kvg_argument* arguments;
  uint32_t num_arguments;
  uint32_t grid[3];     // in blocks
  uint32_t cluster[3];  // blocks of a cluster, which divide the grid; all 0 or all 1: none
  uint32_t num_warps;
  uint32_t shared_bytes;  // dynamic
  void* stream;           // CUstream of the module's context; NULL: the default stream
} kvg_launch;

KVG_LAUNCH_EXPORT uint32_t kvg_cuda_abi_version(void);
// 1000 * major + 10 * minor of the newest CUDA that the driver knows.
KVG_LAUNCH_EXPORT int32_t kvg_cuda_driver_version(int32_t* version, char* message,
                                                  size_t message_size);
KVG_LAUNCH_EXPORT int32_t kvg_cuda_device_count(int32_t* count, char* message, size_t message_size);
// Fills in what follows `ordinal`.
KVG_LAUNCH_EXPORT int32_t kvg_cuda_describe(kvg_cuda_device* device, char* message,
                                            size_t message_size);
// Refuses where an image for `arch` cannot run on the device: by driver and compute capability.
KVG_LAUNCH_EXPORT int32_t kvg_cuda_check_arch(const char* arch, int32_t ordinal, char* message,
                                              size_t message_size);
KVG_LAUNCH_EXPORT int32_t kvg_cuda_load(const kvg_cuda_image* image, uint64_t* module,
                                        char* message, size_t message_size);
// Finds the function and sets its shared memory, so that a later kvg_cuda_launch of it does nothing
// but launch, as is required while a stream is captured.
KVG_LAUNCH_EXPORT int32_t kvg_cuda_prepare(uint64_t module, const char* function,
                                           uint32_t shared_bytes, char* message,
                                           size_t message_size);
// Enqueues; an error that the kernel makes while it runs shows in a later call.
KVG_LAUNCH_EXPORT int32_t kvg_cuda_launch(const kvg_launch* launch, char* message,
                                          size_t message_size);

#ifdef __cplusplus
}
#endif

#endif  // KVGRAPH_LAUNCH_H_
