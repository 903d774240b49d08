// The inner loops of the CPU kernels, compiled once per instruction set and chosen at run time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>

#include "kvgraph/contract.h"

namespace kvg {

constexpr int64_t kKeys = 32;  // of a tile: K and V of it stay in the first-level cache
constexpr int64_t kLine = 64;  // bytes that memory gives at once
constexpr float kInfinity = std::numeric_limits<float>::infinity();

// Rows of one stored dtype.
struct Dtype {
  size_t size;  // bytes of one element
  void (*to_float)(const void* from, float* to, size_t count);
  void (*from_float)(const float* from, void* to, size_t count);
};

// Running softmax of one query row: the largest score so far (in units of log2(e)), rounded up to an
// integer, and the sum of weights relative to it. Another top scales weights by a power of two, so
// that they are rounded alike wherever a tile or a part of the keys begins.
struct Softmax {
  float top, sum;
};

// Legend: M query rows, D and E row widths, J keys of a tile (rows of kKeys in scores), P pairs of
// elements.

// What memory is asked for while something else is multiplied: bytes [begin, end) of rows, in order,
// from `at` on.
struct Ahead {
  const char* const* row;
  const char* const* last;
  int64_t begin, end, at;

  // Asks for the next lines. Inlined, as GCC takes a function that only prefetches for one without
  // effects, and drops its calls.
  [[gnu::always_inline]] void ask(int64_t lines) {
    for (int64_t i = 0; i < lines && row != last; ++i) {
      __builtin_prefetch(*row + at);
      at += kLine;
      if (at >= end) at = begin, ++row;
    }
  }
};

// K or V of some keys of a tile, of one head: `offset` bytes into each row. Rows beyond the last key
// repeat it.
struct Stream {
  const char* const* row_J;
  const float* factor_J;  // of quantised rows
  int64_t offset;
  Ahead* ahead;  // of as many bytes as are read here
};

// Few query rows over K and V as they lie, in products of the processor's own.
struct StreamKernels {
  int64_t step_size;  // bytes of K or V of all heads that are read at a time: what was fastest
  int64_t (*packed_size)(int64_t rows, int64_t width);  // bytes of queries, a multiple of kLine
  void (*pack_query)(const float* q_D, char* packed, int64_t row, int64_t width);
  // Weights of a tile, times the factors of its values, become what `add` takes, in place.
  void (*pack_weights)(float* weight_MJ, const float* factor_J, int64_t rows);
  // scores[m][j] = q[m] . key[j]
  void (*dot)(const char* packed, const Stream& keys, float* scores_MJ, int64_t rows, int64_t width,
              int64_t count);
  // out[m] += sum over j of weight[m][first + j] value[j]; weights beyond the last key are 0.
  void (*add)(const float* weight_MJ, const Stream& values, float* out_ME, int64_t rows,
              int64_t width, int64_t first, int64_t count);
};

// Query rows over packed tiles of K and V, in products of 16-bit words (word_products.h).
struct TileKernels {
  // The keys of a tile are packed first, from rows of int8, bfloat16, float8 or float32, into kKeys *
  // padded width / 2 words; with the scales of their blocks of `block` elements, a multiple of
  // kKeys, or without any (null).
  void (*pack_keys)(const void* const* key_J, int32_t dtype, const float* const* scale_J,
                    int64_t block, uint32_t* packed, int64_t width, int64_t keys);
  void (*pack_values)(const void* const* value_J, int32_t dtype, const float* const* scale_J,
                      int64_t block, uint32_t* packed, int64_t width, int64_t keys);
  // Of padded width / 2 words; returns their unit.
  float (*pack_query)(const float* q_D, uint32_t* to, int64_t width);
  // `factor`, of each key; null: none has one, which never is so of integers.
  void (*dot)(const uint32_t* q_MP, const float* unit_M, const uint32_t* packed,
              const float* factor_J, float* scores_MJ, int64_t rows, int64_t width);
  // Sums of `step` keys are added at a time.
  void (*add)(const float* weight_MJ, const uint32_t* packed, const float* factor_J, float* out_ME,
              int64_t rows, int64_t width, int64_t keys, int64_t step);
};

struct Kernels {
  Dtype dtypes[KVG_INT32];  // by kvg_dtype

  // scores[m][j] = q[m] . key[j]. The keys are rows of `dtype`, which reads_as_stored() takes; those
  // of q are `stride` apart.
  void (*dot)(const float* q_MD, const void* const* key_J, int32_t dtype, float* scores_MJ,
              int64_t rows, int64_t width, int64_t stride, int64_t keys);
  // out[m] += sum over j of weight[m][j] value[j]; the rows of out are `stride` apart.
  void (*add)(const float* weight_MJ, const void* const* value_J, int32_t dtype, float* out_ME,
              int64_t rows, int64_t width, int64_t stride, int64_t keys);
  // Turns dot products of keys [begin, end), times `factor`, into weights, and the rest of kKeys into
  // 0, whatever it holds; scales the outputs so far to the new tops. softcap > 0: `factor` makes
  // scores divided by it.
  void (*weigh)(float* score_MJ, int64_t rows, int64_t begin, int64_t end, float factor,
                float softcap, Softmax* state_M, float* out_ME, int64_t width);
  // Adds what another part of the keys left: its state and output.
  void (*join)(Softmax* state, float* out_E, Softmax other, const float* other_E, int64_t width);
  // Divides by the sum of weights; a sink (-infinity: none) is one more logit without a value.
  void (*finish)(Softmax state, float sink, float* out_E, int64_t width);
  void (*scale)(float* x, float factor, int64_t count);
  // Of logits; a NaN counts as none. The lowest id of the greatest; 0 where there is none.
  int64_t (*argmax)(const float* x, int64_t count);
  // maxima[g]: the largest of x[g * width] and the numbers behind it, or -infinity; width: of 16.
  void (*group_maxima)(const float* x, int64_t count, int64_t width, float* maxima);
  // The same; and the sum of exp((x - the largest) / temperature), to 5e-6 for up to 2^18 numbers.
  double (*weigh_groups)(const float* x, int64_t count, int64_t width, float* maxima,
                         float temperature);
  // A number that at least `most` of x reach, and not many more unless these are equal.
  float (*reached_by)(const float* x, int64_t count, int64_t most);
  // Ids of x >= least, in order, and how many there are, given group_maxima; more than `room`: some,
  // and more than that. `ids` has room for width + 16 more.
  int64_t (*at_least)(const float* x, int64_t count, int64_t width, const float* maxima, float least,
                      int32_t* ids, int64_t room);
  // nullptr: the processor has no dot products of its own
  const TileKernels* tiles[KVG_INT32];  // by kvg_dtype of the pool
  const StreamKernels* streams[KVG_INT32];
};

// The best that this processor runs, or those that KVGRAPH_CPU_ISA names; throws a Refusal where
// they are unknown here.
const Kernels& kernels();

struct LinearKernels;
const LinearKernels& linear_kernels();  // of the same instruction set

inline const Dtype& dtype(int32_t code) { return kernels().dtypes[code]; }

// Whether dot and add read rows of this dtype as they are stored.
inline bool reads_as_stored(int32_t code) {
  return code == KVG_FLOAT32 || code == KVG_BFLOAT16 || code == KVG_FLOAT16 || code == KVG_INT8;
}

// Largest magnitude that a quantised element stores; 0 for dtypes that are stored as they are.
inline float quantized_max(int32_t code) { return KVG_DTYPE_LARGEST[code]; }

}  // namespace kvg
