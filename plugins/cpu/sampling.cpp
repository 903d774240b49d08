// The likeliest tokens of rows of logits, for the sampler of the engine.
#include <algorithm>
#include <cstdint>
#include <functional>
#include <vector>

#include "cpu/check.h"
#include "cpu/kernels.h"
#include "cpu/parallel.h"
#include "kvgraph/abi.h"

namespace {

void find(const kvg_row& row, int64_t vocab, int32_t* ids, int64_t room, kvg_likeliest* found) {
  const kvg::Kernels& kernels = kvg::kernels();
  static thread_local std::vector<float> maxima;
  maxima.resize(static_cast<size_t>(row.groups));
  *found = {-1, 0};
  if (!kernels.group_maxima(row.logits, vocab, maxima.data(), row.groups)) return;
  const auto least = maxima.begin() + (row.most - 1);
  std::nth_element(maxima.begin(), least, maxima.end(), std::greater<float>());
  found->count = kernels.at_least(row.logits, vocab, *least, ids, room);
  if (row.temperature > 0) {
    const float top = *std::max_element(maxima.begin(), least + 1);
    found->total = kernels.weight_sum(row.logits, vocab, top, row.temperature);
  }
}

}  // namespace

extern "C" int32_t kvg_cpu_likeliest(const kvg_row* rows, size_t count, int64_t vocab, int32_t* ids,
                                     int64_t room, kvg_likeliest* found, char* message,
                                     size_t message_size) {
  return kvg::entry(message, message_size, [&] {
    kvg::kernels();  // refuses here, not in a task
    for (size_t i = 0; i < count; ++i)
      if (rows[i].groups < 1 || rows[i].groups > vocab || rows[i].most < 1 ||
          rows[i].most > rows[i].groups)
        kvg::refuse("likeliest: row %zu: expected 1 to groups %lld of vocab %lld tokens, got %lld", i,
                    static_cast<long long>(rows[i].groups), static_cast<long long>(vocab),
                    static_cast<long long>(rows[i].most));
    const kvg_call call = {};
    kvg::parallel_for(call, count, [&](size_t i) {
      find(rows[i], vocab, ids + static_cast<int64_t>(i) * room, room, found + i);
    });
  });
}
