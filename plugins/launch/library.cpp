// The entry points of launch.h for plans and for records of kernels.
#include <cstring>

#include "cuda/frame.h"
#include "launch/kernels.h"
#include "launch/plan.h"

namespace kvg::launch {
namespace {

const kvg_op& op_of(const char* name) {
  for (const kvg_op* op : KVG_OPS)
    if (name && !std::strcmp(op->name, name)) return *op;
  refuse(KVG_REFUSED, "op: expected one of domain %s, got \"%.100s\"", KVG_DOMAIN,
         name ? name : "");
}

kvg_plan& checked(kvg_plan* plan) {
  cuda::check_frame("plan", plan);
  if (!plan->op) refuse(KVG_REFUSED, "plan: op: expected a name, got a null pointer");
  return *plan;
}

}  // namespace
}  // namespace kvg::launch

using namespace kvg;

extern "C" {

uint32_t kvg_cuda_kernels_version(void) { return KVG_KERNELS_VERSION; }

int32_t kvg_cuda_plan(kvg_plan* plan, char* message, size_t message_size) {
  return entry(message, message_size, [&] { launch::plan_step(launch::checked(plan)); });
}

int32_t kvg_cuda_bound_scratch(kvg_plan* plan, char* message, size_t message_size) {
  return entry(message, message_size, [&] { launch::bound_scratch(launch::checked(plan)); });
}

int32_t kvg_cuda_check_kernels(const void* record, size_t record_size, const char* op, int32_t stores,
                               char* message, size_t message_size) {
  return entry(message, message_size, [&] {
    const std::string bytes(static_cast<const char*>(record), record ? record_size : 0);
    launch::read_kernels(launch::op_of(op), bytes, stores);
  });
}

}  // extern "C"
