#include "cpu/attention.h"
#include "cpu/store_kv.h"

namespace kvg {
namespace {

void check_norms(const Operands& in) {
  const bool k = in.has(KVG_UPDATE_AND_ATTEND_K), q_norm = in.has(KVG_UPDATE_AND_ATTEND_Q_NORM),
             k_norm = in.has(KVG_UPDATE_AND_ATTEND_K_NORM);
  if (!k && k_norm) refuse("%s: k_norm: expected none without k, got one", in.op.name);
  if (k && q_norm != k_norm)
    refuse("%s: %s: expected both q_norm and k_norm or neither, got only %s", in.op.name,
           q_norm ? "k_norm" : "q_norm", q_norm ? "q_norm" : "k_norm");
}

}  // namespace
}  // namespace kvg

extern "C" int32_t kvg_cpu_update_and_attend(const kvg_call* call, char* message,
                                             size_t message_size) {
  using namespace kvg;
  return entry(message, message_size, [&] {
    const Operands in = check(KVG_OP_UPDATE_AND_ATTEND, call);
    const auto given = check_attributes(in, KVG_UPDATE_AND_ATTEND_ATTR_LAYER);
    check_heads(in);
    const bool stores = in.has(KVG_UPDATE_AND_ATTEND_K);
    if (stores != in.has(KVG_UPDATE_AND_ATTEND_V))
      refuse("%s: %s: expected both k and v or neither, got only %s", in.op.name,
             stores ? "v" : "k", stores ? "k" : "v");
    const Pool pool = check_pool(in, KVG_UPDATE_AND_ATTEND_KV_BLOCKS,
                                 KVG_UPDATE_AND_ATTEND_KV_SCALES, given.layer, given.v_head_dim);
    const Rows rows = check_rows(in, KVG_UPDATE_AND_ATTEND_INPUT_ROW_OFFSETS, given.reach());
    const Rope rope = check_rope(in, KVG_UPDATE_AND_ATTEND_COS_SIN,
                                 in.integer(KVG_UPDATE_AND_ATTEND_ATTR_ROPE_STYLE), rows);
    check_norms(in);
    const float epsilon = in.at_least_0(KVG_UPDATE_AND_ATTEND_ATTR_NORM_EPSILON);
    const float offset = in.finite(KVG_UPDATE_AND_ATTEND_ATTR_NORM_OFFSET);
    const auto steps = [&](int norm) {
      return HeadSteps{head_norm(in, norm, epsilon, offset), rope};
    };
    const int32_t dtype = in.dtype(KVG_UPDATE_AND_ATTEND_Q);
    if (stores)
      store({*call, pool, rows, steps(KVG_UPDATE_AND_ATTEND_K_NORM),
             in.data<const char>(KVG_UPDATE_AND_ATTEND_K),
             in.data<const char>(KVG_UPDATE_AND_ATTEND_V), dtype, given.v_head_dim});
    attend({*call, pool, rows, steps(KVG_UPDATE_AND_ATTEND_Q_NORM),
            in.data<const char>(KVG_UPDATE_AND_ATTEND_Q), in.data<char>(KVG_UPDATE_AND_ATTEND_OUT),
            in.data<const float>(KVG_UPDATE_AND_ATTEND_SINKS), dtype, in.dims[KVG_DIM_NUM_HEADS],
            given.v_head_dim, given.window, given.chunked, given.scale, given.softcap, given.causal});
  });
}
