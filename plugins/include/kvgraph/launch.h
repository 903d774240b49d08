// The C ABI of the CUDA launcher: cubin images in, kernel launches out, through the driver API that
// is found at run time. Building and running need no CUDA toolkit. The first call that needs the
// driver looks for it; loading this library does not. Plans are made without a driver, anywhere.
//
// Every function returns a kvg_status and on refusal writes one sentence into `message`. All may be
// called from several threads at once. Modules live as long as the process: an image is loaded once
// per context, however many sessions ask for it.
#ifndef KVGRAPH_LAUNCH_H_
#define KVGRAPH_LAUNCH_H_

#include <stddef.h>
#include <stdint.h>

#include "kvgraph/contract.h"

#define KVG_LAUNCH_EXPORT __attribute__((visibility("default")))

#ifdef __cplusplus
extern "C" {
#endif

// Version of the structs and functions below. KVG_ABI_VERSION is separate: ops change more often.
#define KVG_LAUNCH_ABI_VERSION 3
#define KVG_MAX_LAUNCH_ARGUMENTS 62

typedef enum kvg_status {
  KVG_DONE = 0,
  KVG_REFUSED = 1,  // the struct, image or launch is wrong; nothing was done
  KVG_DEVICE = 2,   // the machine cannot: no or an old driver, another architecture, a driver error
} kvg_status;

// Fields are only ever appended. The longer struct of a newer caller is accepted.
typedef struct kvg_cuda_device {
  uint32_t abi_version;  // KVG_LAUNCH_ABI_VERSION, set by the caller
  uint32_t struct_size;  // sizeof(kvg_cuda_device), set by the caller
  int32_t ordinal;       // set by the caller
  int32_t major, minor;  // compute capability
  int32_t multiprocessors;
  int32_t shared_bytes;  // most shared memory that one block may ask for
} kvg_cuda_device;

typedef struct kvg_cuda_image {
  uint32_t abi_version;
  uint32_t struct_size;
  const void* data;       // a cubin; read during the call only
  uint64_t size;          // in bytes
  const char* arch;       // what it was compiled for: "sm_90" runs on 9.x, "sm_90a" on 9.0 alone
  const uint8_t* sha256;  // the image's expected SHA-256, 32 bytes; NULL: not checked
  int32_t device;         // ordinal. The image is loaded into the thread's context if that is on
                          // this device, else into the primary context
  int32_t min_driver;     // oldest driver, 1000 * major + 10 * minor: the CUDA version of the
                          // image's ptxas; 0: what arch needs
} kvg_cuda_image;

typedef enum kvg_argument_kind {
  KVG_ARGUMENT_POINTER = 1,
  KVG_ARGUMENT_INT32 = 2,
  KVG_ARGUMENT_INT64 = 3,
  KVG_ARGUMENT_FLOAT32 = 4,
} kvg_argument_kind;

typedef struct kvg_argument {
  uint32_t kind;
  uint32_t alignment;  // bytes to which the kernel expects a pointer to be aligned; 0: no alignment
  union {
    uint64_t pointer;
    int32_t i32;
    int64_t i64;
    float f32;
  } value;
} kvg_argument;

// A kernel that Triton compiled takes two more pointers (global and profile scratch) after its own
// arguments: the launcher appends them, as NULL. A block is num_warps * 32 threads.
typedef struct kvg_launch {
  uint32_t abi_version;
  uint32_t struct_size;
  uint64_t module;  // from kvg_cuda_load
  const char* function;
  const kvg_argument* arguments;
  uint32_t num_arguments;
  uint32_t grid[3];     // in blocks
  uint32_t cluster[3];  // reserved: 0 or 1 each
  uint32_t num_warps;
  uint32_t shared_bytes;  // dynamic shared memory of a block
  void* stream;           // CUstream of the module's context; NULL: the default stream
} kvg_launch;

// Constants that the kernels of an op were compiled for. A dim is 0 if the op has no such dim.
typedef struct kvg_constants {
  double scale, softcap, norm_epsilon, norm_offset;
  int32_t window, chunked, causal, rope_style;
  int32_t num_layers, page_size, num_kv_heads, head_dim, v_head_dim, num_heads, scales_per_head,
      rotary_dim;
  int32_t dtype, pool_dtype;  // kvg_dtype of the type variables T and P
  int32_t norms;              // 1: heads of q and k are normalised, with norm_epsilon and norm_offset
  int32_t reserved;           // 0
} kvg_constants;

// How the kernels of one architecture split a step.
typedef struct kvg_tiling {
  int32_t store_tokens, prefill_tokens, decode_tokens;  // new tokens of a row that a tile takes
  int32_t multiprocessors;
  int32_t min_part, max_parts;  // fewest keys of a part of a context; most parts
} kvg_tiling;

// Sizes of a step that the host knows. max_new and max_context are upper bounds of the lengths on
// the device, each alone. Refused: numbers below 0, and batch_size, max_new and max_context below 1;
// numbers above int32, except max_context up to 2^48; a batch above 2^30.
typedef struct kvg_sizes {
  int64_t batch_size, total_seq_len, max_new, max_context, table_width;
  int64_t max_positions;  // positions of cos_sin, which no context may exceed; 0: not checked
} kvg_sizes;

typedef struct kvg_planned {
  int64_t role;                     // KVG_ROLE_*
  int64_t grid[2];                  // in blocks
  int64_t values[KVG_VALUE_COUNT];  // indexed by KVG_VALUE_*
} kvg_planned;

#define KVG_MAX_PLANNED 4

// The launches of one layer's step, in stream order.
typedef struct kvg_plan {
  uint32_t abi_version;
  uint32_t struct_size;
  const char* op;  // name, for refusals
  kvg_constants constants;
  kvg_tiling tiling;
  kvg_sizes sizes;
  int32_t layer, stores, attends;
  int32_t num_launches;  // this and the fields below are filled in
  kvg_planned launches[KVG_MAX_PLANNED];
  int64_t scratch[KVG_SCRATCH_COUNT];  // sizes in float32 elements
} kvg_plan;

// The record in a graph node's `kernels`: a kvg_kernels, then num_archs of kvg_arch_kernels, and no
// more; little-endian, as hosts are. Version 1 was text.
#define KVG_KERNELS_VERSION 4
#define KVG_MAX_PARAMETERS 24

typedef enum kvg_parameter_kind {
  KVG_PARAMETER_OPERAND = 1,  // index among update_and_attend's inputs, then outputs
  KVG_PARAMETER_SCRATCH = 2,  // KVG_SCRATCH_*
  KVG_PARAMETER_VALUE = 3,    // KVG_VALUE_*
} kvg_parameter_kind;

typedef struct kvg_parameter {
  uint8_t kind;
  uint8_t index;
  uint16_t alignment;  // in bytes, for pointers
} kvg_parameter;

typedef struct kvg_kernel {
  char function[64];   // with a final NUL; "": no kernel of this role
  uint8_t sha256[32];  // hash of the function's cubin
  uint32_t num_warps, shared_bytes;
  uint32_t num_parameters;
  kvg_parameter parameters[KVG_MAX_PARAMETERS];
} kvg_kernel;

typedef struct kvg_arch_kernels {
  char arch[8];  // with a final NUL
  kvg_tiling tiling;
  kvg_kernel kernels[KVG_ROLE_COUNT];
} kvg_arch_kernels;

typedef struct kvg_kernels {
  uint32_t version;           // KVG_KERNELS_VERSION
  uint32_t contract_version;  // KVG_ABI_VERSION that defines the operands of parameters
  uint32_t arch_size;         // sizeof(kvg_arch_kernels)
  uint32_t num_archs;
  kvg_constants constants;
} kvg_kernels;

KVG_LAUNCH_EXPORT uint32_t kvg_cuda_abi_version(void);
// KVG_KERNELS_VERSION of the records that this library reads.
KVG_LAUNCH_EXPORT uint32_t kvg_cuda_kernels_version(void);
// Fills in num_launches, launches and scratch. Needs no driver.
KVG_LAUNCH_EXPORT int32_t kvg_cuda_plan(kvg_plan* plan, char* message, size_t message_size);
// Fills in `scratch` with the most that any step up to `sizes` may use.
KVG_LAUNCH_EXPORT int32_t kvg_cuda_bound_scratch(kvg_plan* plan, char* message,
                                                 size_t message_size);
// Refuses a malformed record, or one without a kernel that op `op` launches (`stores`: the op is
// given k and v).
KVG_LAUNCH_EXPORT int32_t kvg_cuda_check_kernels(const void* record, size_t record_size,
                                                 const char* op, int32_t stores, char* message,
                                                 size_t message_size);
KVG_LAUNCH_EXPORT int32_t kvg_cuda_device_count(int32_t* count, char* message, size_t message_size);
// Fills in the fields after `ordinal`.
KVG_LAUNCH_EXPORT int32_t kvg_cuda_describe(kvg_cuda_device* device, char* message,
                                            size_t message_size);
// Refuses if the driver or the device's compute capability cannot run an image for `arch`.
KVG_LAUNCH_EXPORT int32_t kvg_cuda_check_arch(const char* arch, int32_t ordinal, char* message,
                                              size_t message_size);
KVG_LAUNCH_EXPORT int32_t kvg_cuda_load(const kvg_cuda_image* image, uint64_t* module,
                                        char* message, size_t message_size);
// Finds the function and sets its shared memory. A later kvg_cuda_launch of it then only launches,
// as is required while a stream is captured.
KVG_LAUNCH_EXPORT int32_t kvg_cuda_prepare(uint64_t module, const char* function,
                                           uint32_t shared_bytes, char* message,
                                           size_t message_size);
// Enqueues the kernel. An error that occurs while it runs is reported by a later call.
KVG_LAUNCH_EXPORT int32_t kvg_cuda_launch(const kvg_launch* launch, char* message,
                                          size_t message_size);

#ifdef __cplusplus
}
#endif

#endif  // KVGRAPH_LAUNCH_H_
