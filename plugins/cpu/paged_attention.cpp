#include "cpu/attention.h"

extern "C" int32_t kvg_cpu_paged_attention(const kvg_call* call, char* message,
                                           size_t message_size) {
  using namespace kvg;
  return entry(message, message_size, [&] {
    const Operands in = check(KVG_OP_PAGED_ATTENTION, call);
    const auto given = check_attributes(in, KVG_PAGED_ATTENTION_ATTR_LAYER);
    check_heads(in);
    const Pool pool = check_pool(in, KVG_PAGED_ATTENTION_KV_BLOCKS, KVG_PAGED_ATTENTION_KV_SCALES,
                                 given.layer, given.v_head_dim);
    const Rows rows = check_rows(in, KVG_PAGED_ATTENTION_INPUT_ROW_OFFSETS, given.reach());
    attend({*call, pool, rows, HeadSteps{}, in.data<const char>(KVG_PAGED_ATTENTION_Q),
            in.data<char>(KVG_PAGED_ATTENTION_OUT),
            in.data<const float>(KVG_PAGED_ATTENTION_SINKS), in.dtype(KVG_PAGED_ATTENTION_Q),
            in.dims[KVG_DIM_NUM_HEADS], given.v_head_dim, given.window, given.chunked, given.scale, given.softcap,
            given.causal});
  });
}
