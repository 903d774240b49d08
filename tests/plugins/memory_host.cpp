// A caller whose memory ends while tasks run: `operator new` refuses what has `limit` bytes or more.
#include <atomic>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <new>
#include <thread>
#include <vector>

#include "kvgraph/abi.h"

namespace {

std::atomic<size_t> limit{SIZE_MAX};

void* allocate(size_t bytes, size_t alignment) {
  if (bytes >= limit.load()) throw std::bad_alloc();
  void* made = std::aligned_alloc(alignment, (bytes / alignment + 1) * alignment);
  if (!made) throw std::bad_alloc();
  return made;
}

}  // namespace

void* operator new(size_t bytes) { return allocate(bytes, alignof(std::max_align_t)); }
void* operator new(size_t bytes, std::align_val_t alignment) {
  return allocate(bytes, static_cast<size_t>(alignment));
}
void operator delete(void* made) noexcept { std::free(made); }
void operator delete(void* made, size_t) noexcept { std::free(made); }
void operator delete(void* made, std::align_val_t) noexcept { std::free(made); }
void operator delete(void* made, size_t, std::align_val_t) noexcept { std::free(made); }

namespace {

char message[512];
int32_t token;  // that `punish` drew

// Calls `body` with little memory, then with enough; the sentence of the first, and of the second.
template <class Body>
void report(const char* name, size_t bytes, Body&& body) {
  for (size_t most : {bytes, SIZE_MAX}) {
    limit = most;
    message[0] = 0;
    const int32_t status = body();
    limit = SIZE_MAX;
    std::printf("%s: %d %s\n", name, status, message);
  }
}

// A host's threads: they know of no exceptions.
void on_threads(void*, kvg_task fn, void* task, size_t count) {
  const auto half = [=](size_t first) noexcept {
    for (size_t i = first; i < count; i += 2) fn(task, i);
  };
  std::thread other(half, 1);
  half(0);
  other.join();
}

constexpr kvg_draw kLikeliest = {0, 1, 0, 0, 0, nullptr};

void sample() {
  constexpr int64_t kRows = 8, kVocab = 50000;
  std::vector<float> logits(kRows * kVocab);
  kvg_edits edits = {};
  edits.repetition = 1;
  std::vector<kvg_draw> draws(kRows, kLikeliest);
  std::vector<kvg_drawn> drawn(kRows);
  const auto draw = [&](int64_t vocab) {
    return kvg_cpu_sample(logits.data(), draws.data(), kRows, vocab, drawn.data(), message,
                          sizeof message);
  };
  draw(64);  // the pool's threads start
  for (kvg_draw& each : draws) each.edits = &edits;
  report("sample", 4 * kVocab, [&] { return draw(kVocab); });
}

// Penalties of a row are counted from zero after a call that failed while it counted.
void punish() {
  constexpr int32_t kVocab = 1000;
  std::vector<float> logits(kVocab);
  logits[5] = 10, logits[kVocab - 1] = 1;
  std::vector<int32_t> tokens(kVocab - 1);
  for (int32_t i = 0; i < kVocab - 1; ++i) tokens[static_cast<size_t>(i)] = i;
  kvg_edits edits = {};
  edits.repetition = 100, edits.tokens = tokens.data();
  kvg_draw draw = kLikeliest;
  draw.edits = &edits;
  kvg_drawn drawn = {};
  const auto of = [&](int64_t count) {
    edits.num_tokens = count;
    return kvg_cpu_sample(logits.data(), &draw, 1, kVocab, &drawn, message, sizeof message);
  };
  of(1);  // the row and its counts have their memory
  report("punish", 1000, [&] { return of(kVocab - 1); });
  token = drawn.token;
}

void attend(const char* name, bool stores, size_t bytes, kvg_parallel_for loop) {
  constexpr int64_t kBatch = 8, kNew = 8, kHeads = 32, kWidth = 512, kTokens = kBatch * kNew;
  std::vector<float> q(kTokens * kHeads * kWidth, 1.0f), out(q.size());
  std::vector<float> k(kTokens * kWidth, 1.0f), pool(kBatch * 2 * kNew * kWidth);
  std::vector<int32_t> offsets(kBatch + 1), cached(kBatch), table(kBatch), longest(2, kNew);
  for (int32_t b = 0; b <= kBatch; ++b) offsets[static_cast<size_t>(b)] = b * kNew;
  for (int32_t b = 0; b < kBatch; ++b) table[static_cast<size_t>(b)] = b;
  const kvg_tensor key = {k.data(), KVG_FLOAT32, 3, {kTokens, 1, kWidth}};
  const kvg_tensor blocks = {pool.data(), KVG_FLOAT32, 6, {kBatch, 2, 1, kNew, 1, kWidth}};
  const kvg_tensor rows[] = {{offsets.data(), KVG_INT32, 1, {kBatch + 1}},
                             {cached.data(), KVG_INT32, 1, {kBatch}},
                             {table.data(), KVG_INT32, 2, {kBatch, 1}}};
  kvg_tensor attention[KVG_MAX_OPERANDS] = {};
  attention[KVG_UPDATE_AND_ATTEND_Q] = {q.data(), KVG_FLOAT32, 3, {kTokens, kHeads, kWidth}};
  attention[KVG_UPDATE_AND_ATTEND_KV_BLOCKS] = blocks;
  std::memcpy(attention + KVG_UPDATE_AND_ATTEND_INPUT_ROW_OFFSETS, rows, sizeof rows);
  attention[KVG_UPDATE_AND_ATTEND_MAX_LENGTHS] = {longest.data(), KVG_INT32, 2, {1, 2}};
  attention[KVG_UPDATE_AND_ATTEND_OUT] = {out.data(), KVG_FLOAT32, 3, {kTokens, kHeads, kWidth}};
  attention[KVG_UPDATE_AND_ATTEND_KV_BLOCKS_OUT] = blocks;
  kvg_tensor store[KVG_MAX_OPERANDS] = {};
  store[KVG_STORE_KV_KV_BLOCKS] = blocks;
  store[KVG_STORE_KV_K] = store[KVG_STORE_KV_V] = key;
  std::memcpy(store + KVG_STORE_KV_INPUT_ROW_OFFSETS, rows, sizeof rows);
  store[KVG_STORE_KV_KV_BLOCKS_OUT] = blocks;
  const kvg_op& op = stores ? KVG_OP_STORE_KV : KVG_OP_UPDATE_AND_ATTEND;
  kvg_value attributes[KVG_MAX_ATTRIBUTES] = {};
  if (!stores) {
    attributes[KVG_UPDATE_AND_ATTEND_ATTR_SCALE].f = 0.1;
    attributes[KVG_UPDATE_AND_ATTEND_ATTR_CAUSAL].i = 1;
  }
  kvg_call call = {};
  call.abi_version = KVG_ABI_VERSION, call.struct_size = sizeof call;
  call.operands = stores ? store : attention, call.attributes = attributes;
  call.num_operands = static_cast<uint32_t>(op.num_inputs + op.num_outputs);
  call.num_attributes = static_cast<uint32_t>(op.num_attributes);
  call.parallel_for = loop, call.num_threads = 2;
  const auto entry = stores ? kvg_cpu_store_kv : kvg_cpu_update_and_attend;
  report(name, bytes, [&] { return entry(&call, message, sizeof message); });
}

}  // namespace

int main() {
  kvg_cpu_set_num_threads(4);
  sample();
  punish();
  attend("store", true, 2000, nullptr);
  attend("threads: store", true, 2000, on_threads);
  attend("attend", false, 100000, nullptr);
  attend("threads: attend", false, 100000, on_threads);
  std::printf("token: %d\n", token);
}
