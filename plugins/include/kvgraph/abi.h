// The C ABI of kvgraph's kernels: one entry point per op, plain structs, raw pointers.
//
// A caller fills a kvg_call with the op's operands (inputs, then outputs) and attributes in the
// order of the tables in contract.h, and calls kvg_cpu_<op>. A kernel checks everything that it
// relies on (versions, dtypes, shapes, alignment, address of aliased buffers, page ids) before it
// writes anything; on refusal it returns non-zero and writes one sentence into `message`. A call that
// runs out of memory is refused too; outputs, and the slots of new tokens, then hold anything.
//
// Entry points may be called from several threads at once, on disjoint pages.
#ifndef KVGRAPH_ABI_H_
#define KVGRAPH_ABI_H_

#include <stddef.h>
#include <stdint.h>

#include "kvgraph/contract.h"

#define KVG_EXPORT __attribute__((visibility("default")))

#ifdef __cplusplus
extern "C" {
#endif

// Dense, row-major. dtype == 0 means that the operand is left out (an optional one, or an output
// that aliases an input: data, rank and shape are then ignored). data may be NULL where an extent
// is 0; else it is a multiple of an element's size (KVG_DTYPE_BYTES). An extent is at most 2^40, the
// product of those above 0 at most 2^48.
//
// Outputs overlap neither each other nor inputs, but for those that alias an input, an output of
// linear that is x, and an output of attention that is q where both have as wide heads.
typedef struct kvg_tensor {
  void* data;
  int32_t dtype;  // kvg_dtype; 0: left out
  int32_t rank;
  int64_t shape[KVG_MAX_RANK];
} kvg_tensor;

typedef union kvg_value {
  int64_t i;
  double f;
} kvg_value;

// Runs fn(task, index) for every index in [0, count), in any order, on any threads, and returns
// when all are done. A host gives its own thread pool here, so that kernels start no threads. A
// thread that waits in it may run other calls, except collectives.
typedef void (*kvg_task)(void* task, size_t index);
typedef void (*kvg_parallel_for)(void* host, kvg_task fn, void* task, size_t count);

typedef struct kvg_call {
  uint32_t abi_version;  // KVG_ABI_VERSION
  uint32_t struct_size;  // sizeof(kvg_call): fields are only ever appended
  const kvg_tensor* operands;
  const kvg_value* attributes;
  uint32_t num_operands;
  uint32_t num_attributes;
  kvg_parallel_for parallel_for;  // NULL: the kernel library's own pool
  void* host;                     // first argument of parallel_for
  void* stream;                   // reserved: NULL
  uint32_t num_threads;           // parallelism that parallel_for offers; 0: unknown
} kvg_call;

KVG_EXPORT uint32_t kvg_abi_version(void);
KVG_EXPORT int32_t kvg_cpu_store_kv(const kvg_call* call, char* message, size_t message_size);
KVG_EXPORT int32_t kvg_cpu_paged_attention(const kvg_call* call, char* message, size_t message_size);
KVG_EXPORT int32_t kvg_cpu_update_and_attend(const kvg_call* call, char* message,
                                             size_t message_size);
KVG_EXPORT int32_t kvg_cpu_linear(const kvg_call* call, char* message, size_t message_size);
KVG_EXPORT int32_t kvg_cpu_all_reduce(const kvg_call* call, char* message, size_t message_size);
KVG_EXPORT int32_t kvg_cpu_all_gather(const kvg_call* call, char* message, size_t message_size);
KVG_EXPORT int32_t kvg_cpu_experts(const kvg_call* call, char* message, size_t message_size);
KVG_EXPORT int32_t kvg_cpu_route(const kvg_call* call, char* message, size_t message_size);

// Packed weights, of linear and of experts, which have one such weight for each expert: N output
// columns of K inputs, filled up with zeros to multiples of 16 and of 64, as panels of 16 columns. A
// panel's lines of 64 bytes follow each other along K. A line has `per` consecutive inputs of all 16
// columns: first those of column 0, then those of column 1. Numbers are little-endian and finite.
//
//   bits  group   per  a column's inputs in a line
//   32    0       1    float32
//   16    0       2    bfloat16; x is rounded to it
//   8     0       4    int8
//   4     0       8    4 bytes: the low nibble of byte i is input i, the high one input 4 + i
//   8     above   4    a word of codes: input i is its byte {0, 2, 1, 3}[i]
//   4     above   8    a word of codes: input i is its nibble {0, 4, 1, 5, 2, 6, 3, 7}[i], the
//                      lowest first
//
// group 0, 8 and 4 bits: rows of x are rounded to int8. Nibbles are in two's complement, and input k
// of a column is its nibble times a multiplier of 1 to 16, an int8. group_bytes is [panels, K / 32, 8]:
// byte b of inputs 32 g and on has the multipliers less one of columns 2 b (low nibble) and 2 b + 1.
// scales is [panels, 2, 16]: a column's scale, then the sum of its int8, that are multiplied already.
//
// group above 0, a multiple of 32 (of NVFP4, of 16): G = ceil(K / group) groups of a column, of K as
// filled up; rows of x are rounded to bfloat16. A weight by `codes`:
//
//   KVG_CODES_INTEGERS  4 bits  (-8 to 7 + group_bytes [panels, G, 16]) * scales [panels, G, 16];
//                               group_bytes may be left out
//   KVG_CODES_E2M1      4 bits  E2M1 * 2^(group_bytes [panels, G, 16] - 127), of bytes 1 to 254; no scales
//   KVG_CODES_E4M3      8 bits  E4M3 * scales [panels, G, 16]; no group_bytes
//   KVG_CODES_INT8      8 bits  -128 to 127 * scales [panels, G, 16]; no group_bytes
//   KVG_CODES_NVFP4     4 bits  E2M1 * E4M3 of group_bytes [panels, G, 16] * scales [panels, 1, 16]
//   KVG_CODES_EIGHTHS   4 bits  (-8 to 7 + group_bytes [panels, G, 16] / 8) * scales [panels, G, 16]
//   KVG_CODES_IQ4_NL    4 bits  one of IQ4_NL's 16 levels * scales [panels, G, 16]; no group_bytes
//
// An output of linear begins with a panel. With silu_mul, and in `up` of experts, panel 2 p has the
// gate's columns 16 p and on, and panel 2 p + 1 the same columns of what the gate lets through.

typedef enum kvg_gathered { KVG_GATHER_FAILED, KVG_GATHER_DONE, KVG_GATHER_WAITS } kvg_gathered;

// Gathers `bytes` of each rank: rank i's are at parts + i * stride, where this rank's already are.
// `first`: 1 starts a gather; 0 asks if the started one is done. Returns within about 100 ms.
typedef int32_t (*kvg_gather)(void* context, void* parts, uint64_t stride, uint64_t bytes,
                              int32_t first);

// One rank of a tensor-parallel graph. Ranks of one machine exchange pieces in shared memory; those
// of several machines use `gather`, a function of the caller. The caller owns the group; a thread
// that has entered it runs that rank's graph.
typedef struct kvg_group {
  void* memory;          // kvg_cpu_group_bytes(size) bytes at a multiple of 8, zeroed; shared by all
                         // ranks, unless they gather
  const int32_t* exits;  // [size]: a descriptor that is readable once the rank's process has ended
                         // (pidfd_open(2)); with `gather`: a connected socket, on which ranks tell
                         // why a step fails; -1: a rank that cannot end alone, such as this one
  int32_t rank, size;    // 0 to size - 1; 1 to KVG_MOST_RANKS
  int64_t timeout_ms;   // how long a collective waits for another rank: 0 or more; above 2^40, it
                        // counts as 2^40
  uint64_t calls;       // pieces exchanged so far, equal on all ranks; 0 at first
  uint64_t waited_ns;   // time spent waiting for other ranks
  uint64_t moved_bytes; // bytes of this rank's operands that were exchanged
  kvg_gather gather;    // NULL: the ranks share memory
  void* context;        // first argument of `gather`
} kvg_group;

#define KVG_MOST_RANKS 64

KVG_EXPORT uint64_t kvg_cpu_group_bytes(int32_t size);  // 0: no group has that size
// Sets the group of the calling thread; NULL: none. It must stay valid until the thread leaves it.
KVG_EXPORT void kvg_cpu_enter_group(kvg_group* group);
// Makes the collectives of all ranks fail from now on; their refusals name this rank. Here and
// below, NULL and a group that is not whole (memory, rank, size) are ignored.
KVG_EXPORT void kvg_cpu_abort_group(kvg_group* group);

// KVG_RANK_CUT_OFF: `gather` failed on the rank or took too long, while all others seem to run.
typedef enum kvg_group_fault {
  KVG_RANK_ENDED = 1,
  KVG_RANK_LATE,
  KVG_RANK_FAILED,
  KVG_RANK_CUT_OFF
} kvg_group_fault;

// Returns why collectives of the group fail: kvg_group_fault << 16 | the rank; 0: they do not.
KVG_EXPORT uint32_t kvg_cpu_group_broken(kvg_group* group);

// Edits of a row of logits before a token is drawn from it, applied in the order of the fields.
// Token ids are in [0, vocab). Values outside the ranges below are refused.
typedef struct kvg_edits {
  const uint32_t* mask;   // [num_words]; bit b of word w is 1 where token 32 w + b may be drawn;
                          // NULL: all may
  const int32_t* banned;  // [num_banned]: tokens that may not be drawn
  const int32_t* biased;  // [num_biased]
  const float* bias;      // [num_biased]: added to the logits of `biased`
  const int32_t* tokens;  // [num_tokens]: the prompt, then the output; penalties apply to them
  int64_t num_words;      // (vocab + 31) / 32 or more
  int64_t num_banned, num_biased, num_tokens;
  int64_t num_prompt;  // tokens of the prompt, 0 to num_tokens
  double repetition;   // > 0, finite; divides the logits of `tokens` above 0, multiplies the others
  double presence;     // finite; subtracted from the logit of each token of the output
  double frequency;    // finite; the same, once for each time that the token is in the output
} kvg_edits;

// How a token is drawn from one row of logits. Values outside these ranges are refused.
typedef struct kvg_draw {
  double temperature;  // >= 0, finite; 0: the greatest logit, and the fields up to `edits` have no
                       // effect
  double top_p;        // (0, 1]
  double uniform;      // [0, 1)
  int64_t top_k;       // >= 0; 0: all
  double min_p;        // [0, 1]: keeps tokens of at least this share of the likeliest's probability
  const kvg_edits* edits;  // NULL: none
} kvg_draw;

typedef struct kvg_drawn {
  int32_t token;   // -1: no logit of the row, as edited, is above -infinity
  int32_t ranked;  // number of the row's tokens that were sorted
} kvg_drawn;

// Draws a token of each of `rows` dense rows [vocab]: the inverse transform of `uniform` over the
// tokens that min-p, then top-k, then top-p keep, likeliest first, equal ones by lowest id. A NaN
// counts as -infinity; where the greatest logit is infinite, the lowest such id is drawn. The logits
// are not changed.
KVG_EXPORT int32_t kvg_cpu_sample(const float* logits, const kvg_draw* draws, size_t rows,
                                  int64_t vocab, kvg_drawn* drawn, char* message,
                                  size_t message_size);

#define KVG_MOST_LOGPROBS 20

typedef struct kvg_scored {
  int64_t row;
  int32_t token;
  int32_t most;  // number of the row's likeliest tokens to score too, 0 to KVG_MOST_LOGPROBS
} kvg_scored;

typedef struct kvg_logprob {
  int32_t token;   // -1: the vocabulary has no more
  int32_t rank;    // 1: the likeliest; of equal ones the lowest id is first
  double logprob;  // to 1e-5
} kvg_logprob;

// Writes log_softmax of dense rows [vocab] for each of `count` entries: of its token, then of the
// row's likeliest ones, to found[KVG_MOST_LOGPROBS + 1] per entry. A NaN counts as -infinity.
KVG_EXPORT int32_t kvg_cpu_logprobs(const float* logits, size_t rows, int64_t vocab,
                                    const kvg_scored* asked, size_t count, kvg_logprob* found,
                                    char* message, size_t message_size);

// Rounds dense groups of `width` finite weights (even, at most 256), each of which has `tries`
// steps (at most 256). chosen[group] is the index of the step whose nibbles, weight / step rounded
// to the nearest of -8 to 7, have the least squared error; the first of equal ones. A step of 0
// counts as 1. Runs in the caller's thread; writes the same bytes on every processor.
KVG_EXPORT int32_t kvg_cpu_round_groups(const float* weights, const float* steps, size_t groups,
                                        int64_t width, int64_t tries, int8_t* nibbles,
                                        uint8_t* chosen, char* message, size_t message_size);

// Sets the number of threads of the library's own pool, including the caller's; it serves calls
// without parallel_for. Default: the processors that this process may run on; 0 restores it.
// A forked child keeps it. Results do not depend on it, bit for bit.
KVG_EXPORT void kvg_cpu_set_num_threads(uint32_t count);
KVG_EXPORT uint32_t kvg_cpu_num_threads(void);
// The instruction set of the kernels that this process runs: amx (avx512_bf16, with linear layers of
// many rows on tiles), avx512_bf16, avx512, avx2 or baseline. KVGRAPH_CPU_ISA, read once, forces
// one. "": this processor does not run the forced one, or it is unknown; every kernel then refuses.
KVG_EXPORT const char* kvg_cpu_isa(void);

#ifdef __cplusplus
}
#endif

#endif  // KVGRAPH_ABI_H_
