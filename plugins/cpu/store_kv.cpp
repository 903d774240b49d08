#include "cpu/store_kv.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "cpu/kernels.h"
#include "cpu/parallel.h"

namespace kvg {
namespace {

// Below this many elements, a job is done before another thread wakes up.
constexpr int64_t kElementsPerTask = 32768;

class Writer {
 public:
  explicit Writer(const Store& job)
      : job_(job),
        from_(dtype(job.dtype)),
        to_(dtype(job.pool.dtype)),
        plain_(!job.pool.scales && job.dtype == job.pool.dtype),
        scratch_(static_cast<size_t>(job.pool.head_dim)) {}

  void token(int64_t row, int64_t index) {
    const int64_t position = job_.rows.cached[row] + index - job_.rows.begin(row);
    const int64_t page = job_.rows.page(row, position), offset = position % job_.rows.page_size;
    heads(job_.k, index, job_.pool.at(page, offset, 0), job_.pool.head_dim, true, position);
    heads(job_.v, index, job_.pool.at(page, offset, 1), job_.v_head_dim, false, position);
  }

 private:
  // Writes the heads of one token, `width` elements each, to the pool's elements from `slot` on.
  void heads(const char* from, int64_t index, int64_t slot, int64_t width, bool is_key,
             int64_t position) {
    const Pool& pool = job_.pool;
    const size_t bytes = static_cast<size_t>(width) * from_.size;
    for (int64_t head = 0; head < pool.kv_heads; ++head, slot += pool.head_dim) {
      const char* source = from + (index * pool.kv_heads + head) * static_cast<int64_t>(bytes);
      char* target = pool.data + slot * static_cast<int64_t>(to_.size);
      if (plain_ && !(is_key && job_.steps)) {
        std::memcpy(target, source, bytes);
        continue;
      }
      float* x = scratch_.data();
      const size_t count = static_cast<size_t>(width);
      from_.to_float(source, x, count);
      if (is_key && job_.steps) apply_steps(x, count, position);
      if (pool.scales) quantize(x, width, slot);
      to_.from_float(x, target, count);
    }
  }

  // Rounds the result to the activation dtype, before it is stored as something else.
  void apply_steps(float* x, size_t count, int64_t position) {
    job_.steps.apply(x, position);
    if (plain_) return;
    rounded_.resize(count * from_.size);
    from_.from_float(x, rounded_.data(), count);
    from_.to_float(rounded_.data(), x, count);
  }

  // Divides each group by its scale, max|x| / largest storable, and writes the scales. A denormal
  // scale is so coarse that a quotient may exceed the largest storable: it is clamped.
  void quantize(float* x, int64_t width, int64_t slot) {
    const Pool& pool = job_.pool;
    const int64_t group = pool.head_dim / pool.scales_per_head;
    const float most = quantized_max(pool.dtype);
    float* scales = pool.scales + slot / group;
    for (int64_t begin = 0; begin < width; begin += group, x += group) {
      float largest = 0;
      for (int64_t i = 0; i < group; ++i) {
        const float magnitude = std::fabs(x[i]);
        largest = magnitude <= largest ? largest : magnitude;  // keeps a NaN
        if (largest != largest) break;
      }
      const float scale = largest / most;
      const float divisor = scale == 0 ? 1.0f : scale;
      for (int64_t i = 0; i < group; ++i) {
        const float quotient = x[i] / divisor;
        const float bounded = quotient > most ? most : quotient;  // keeps a NaN
        x[i] = bounded < -most ? -most : bounded;
      }
      *scales++ = scale;
    }
  }

  const Store& job_;
  const Dtype &from_, &to_;
  const bool plain_;
  std::vector<float> scratch_;
  std::vector<char> rounded_;
};

}  // namespace

void store(const Store& job) {
  kernels();  // refuses here, before anything is written
  const int64_t total = job.rows.begin(job.rows.count);
  const int64_t elements = job.pool.kv_heads * (job.pool.head_dim + job.v_head_dim);
  const int64_t chunk = std::max<int64_t>(1, kElementsPerTask / std::max<int64_t>(1, elements));
  const int64_t tasks = ceildiv(total, chunk);
  parallel_for(job.call, static_cast<size_t>(tasks), [&](size_t task) {
    Writer writer(job);
    const int64_t begin = static_cast<int64_t>(task) * chunk, end = std::min(total, begin + chunk);
    const int32_t* offsets = job.rows.offsets;
    int64_t row = std::upper_bound(offsets, offsets + job.rows.count + 1, begin) - offsets - 1;
    for (int64_t index = begin; index < end; ++index) {
      while (index >= offsets[row + 1]) ++row;
      writer.token(row, index);
    }
  });
}

}  // namespace kvg

extern "C" int32_t kvg_cpu_store_kv(const kvg_call* call, char* message, size_t message_size) {
  using namespace kvg;
  return entry(message, message_size, [&] {
    const Operands in = check(KVG_OP_STORE_KV, call);
    const int64_t v_head_dim = in.dims[KVG_DIM_V_HEAD_DIM];
    const Pool pool = check_pool(in, KVG_STORE_KV_KV_BLOCKS, KVG_STORE_KV_KV_SCALES,
                                 in.integer(KVG_STORE_KV_ATTR_LAYER), v_head_dim);
    const Rows rows = check_rows(in, KVG_STORE_KV_INPUT_ROW_OFFSETS, 0);
    store({*call, pool, rows, HeadSteps{}, in.data<const char>(KVG_STORE_KV_K),
           in.data<const char>(KVG_STORE_KV_V), in.dtype(KVG_STORE_KV_K), v_head_dim});
  });
}

extern "C" uint32_t kvg_abi_version(void) { return KVG_ABI_VERSION; }
