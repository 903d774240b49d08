// The inner loops of the CPU kernels, compiled once per instruction set and chosen at run time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>

#include "kvgraph/contract.h"

namespace kvg {

constexpr int64_t kKeys = 32;  // keys of a tile, whose K and V stay in the first-level cache
constexpr int64_t kLine = 64;  // bytes of a line of the cache
constexpr float kInfinity = std::numeric_limits<float>::infinity();

// Conversions of rows of one stored dtype.
struct Dtype {
  size_t size;  // bytes of one element
  void (*to_float)(const void* from, float* to, size_t count);
  void (*from_float)(const float* from, void* to, size_t count);
};

// Running softmax of one query row: the largest score so far (in units of log2(e)), rounded up to an
// integer, and the sum of weights relative to it. A new top scales weights by a power of two, so
// that rounding does not depend on where a tile or a part of the keys begins.
struct Softmax {
  float top, sum;
};

// Legend: M query rows, D and E row widths, J keys of a tile (rows of kKeys in scores), P pairs of
// elements.

// Prefetches during products of other data: bytes [begin, end) of each row, in order, from `at` on.
struct Ahead {
  const char* const* row;
  const char* const* last;
  int64_t begin, end, at;

  // Prefetches the next lines. Always inlined, because GCC regards a function that only prefetches
  // as one without effects, and drops its calls.
  [[gnu::always_inline]] void ask(int64_t lines) {
    for (int64_t i = 0; i < lines && row != last; ++i) {
      __builtin_prefetch(*row + at);
      at += kLine;
      if (at >= end) at = begin, ++row;
    }
  }
};

// K or V of one head, for some keys of a tile: `offset` bytes into each row. Rows beyond the last
// key repeat it.
struct Stream {
  const char* const* row_J;
  const float* factor_J;  // scales of quantised rows
  int64_t offset;
  Ahead* ahead;  // prefetches of as many bytes as are read here
};

// Kernels of few query rows over K and V as they are stored, with native dot products.
struct StreamKernels {
  int64_t step_size;  // bytes of K or V of all heads that are read at a time: the fastest measured
  int64_t (*packed_size)(int64_t rows, int64_t width);  // bytes of queries, a multiple of kLine
  void (*pack_query)(const float* q_D, char* packed, int64_t row, int64_t width);
  // Turns the weights of a tile, times the factors of its values, into inputs of `add`, in place.
  void (*pack_weights)(float* weight_MJ, const float* factor_J, int64_t rows);
  // scores[m][j] = q[m] . key[j]
  void (*dot)(const char* packed, const Stream& keys, float* scores_MJ, int64_t rows, int64_t width,
              int64_t count);
  // out[m] += sum over j of weight[m][first + j] value[j]; weights beyond the last key are 0.
  void (*add)(const float* weight_MJ, const Stream& values, float* out_ME, int64_t rows,
              int64_t width, int64_t first, int64_t count);
};

// Kernels of query rows over packed tiles of K and V, with products of 16-bit words
// (word_products.h).
struct TileKernels {
  // Packs the keys of a tile, rows of int8, bfloat16, float8 or float32, into kKeys * padded width
  // / 2 words, times the scales of their blocks of `block` elements, a multiple of kKeys (null: no
  // scales). pack_values does the same for values.
  void (*pack_keys)(const void* const* key_J, int32_t dtype, const float* const* scale_J,
                    int64_t block, uint32_t* packed, int64_t width, int64_t keys);
  void (*pack_values)(const void* const* value_J, int32_t dtype, const float* const* scale_J,
                      int64_t block, uint32_t* packed, int64_t width, int64_t keys);
  // Writes padded width / 2 words; returns their unit.
  float (*pack_query)(const float* q_D, uint32_t* to, int64_t width);
  // `factor_J`: the scale of each key; null: no scales, which is never so for integers.
  void (*dot)(const uint32_t* q_MP, const float* unit_M, const uint32_t* packed,
              const float* factor_J, float* scores_MJ, int64_t rows, int64_t width);
  // Adds the sums of `step` keys to the output at a time.
  void (*add)(const float* weight_MJ, const uint32_t* packed, const float* factor_J, float* out_ME,
              int64_t rows, int64_t width, int64_t keys, int64_t step);
};

struct Kernels {
  Dtype dtypes[KVG_INT32];  // indexed by kvg_dtype

  // scores[m][j] = q[m] . key[j]. The keys are rows of a `dtype` for which reads_as_stored() is
  // true; the rows of q are `stride` apart.
  void (*dot)(const float* q_MD, const void* const* key_J, int32_t dtype, float* scores_MJ,
              int64_t rows, int64_t width, int64_t stride, int64_t keys);
  // out[m] += sum over j of weight[m][j] value[j]; the rows of out are `stride` apart.
  void (*add)(const float* weight_MJ, const void* const* value_J, int32_t dtype, float* out_ME,
              int64_t rows, int64_t width, int64_t stride, int64_t keys);
  // Turns dot products of keys [begin, end), times `factor`, into weights, and the rest of kKeys into
  // 0, whatever it holds; scales the outputs so far to the new tops. softcap > 0: a dot product
  // times `factor` is the score divided by softcap.
  void (*weigh)(float* score_MJ, int64_t rows, int64_t begin, int64_t end, float factor,
                float softcap, Softmax* state_M, float* out_ME, int64_t width);
  // Adds the state and output of another part of the keys.
  void (*join)(Softmax* state, float* out_E, Softmax other, const float* other_E, int64_t width);
  // Divides by the sum of weights; a sink (-infinity: none) is one more logit without a value.
  void (*finish)(Softmax state, float sink, float* out_E, int64_t width);
  void (*scale)(float* x, float factor, int64_t count);
  // The lowest id of the greatest logit; a NaN is ignored; 0 if there is none above -infinity.
  int64_t (*argmax)(const float* x, int64_t count);
  // maxima[g]: the largest of the `width` numbers from x[g * width] on, or -infinity; `width` is a
  // multiple of 16.
  void (*group_maxima)(const float* x, int64_t count, int64_t width, float* maxima);
  // Does what group_maxima does, and returns the sum of exp((x - the largest) / temperature), to
  // 5e-6 for up to 2^18 numbers.
  double (*weigh_groups)(const float* x, int64_t count, int64_t width, float* maxima,
                         float temperature);
  // A threshold that at least `most` numbers of x reach, and not many more unless they are equal.
  float (*reached_by)(const float* x, int64_t count, int64_t most);
  // Writes the ids of x >= least in order, given group_maxima, and returns their number. If they
  // are more than `room`, it writes some and returns more than `room`. `ids` has room for
  // room + width + 16.
  int64_t (*at_least)(const float* x, int64_t count, int64_t width, const float* maxima, float least,
                      int32_t* ids, int64_t room);
  // nullptr: the processor has no dot products for the dtype
  const TileKernels* tiles[KVG_INT32];  // indexed by kvg_dtype of the pool
  const StreamKernels* streams[KVG_INT32];
};

// The best kernels that this processor runs, or those that KVGRAPH_CPU_ISA names; throws a Refusal
// if they are unknown or this processor does not run them.
const Kernels& kernels();

struct LinearKernels;
const LinearKernels& linear_kernels();  // for the same instruction set

inline const Dtype& dtype(int32_t code) { return kernels().dtypes[code]; }

// Whether dot and add read rows of this dtype as they are stored.
inline bool reads_as_stored(int32_t code) {
  return code == KVG_FLOAT32 || code == KVG_BFLOAT16 || code == KVG_FLOAT16 || code == KVG_INT8;
}

// Largest magnitude that a quantised element stores; 0 for dtypes that are stored as they are.
inline float quantized_max(int32_t code) { return KVG_DTYPE_LARGEST[code]; }

}  // namespace kvg
