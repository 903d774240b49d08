// What TensorRT finds in this library by name, and what kvgraph's own tools and tests call.
#include <cstdio>
#include <cstring>
#include <new>

#include "kvgraph/launch.h"
#include "tensorrt/plugin.h"
#include "tensorrt/report.h"

namespace kvg::tensorrt {
namespace {

using namespace launch;

class Creator final : public trt::Creator {
 public:
  explicit Creator(int op_index) : index_(op_index) {}

  trt::Plugin* create(const char*, const trt::Fields* fields, trt::Phase) noexcept override {
    trt::Plugin* made = nullptr;
    guarded([&] { made = new Plugin(read_settings(*KVG_OPS[index_], fields)); });
    return made;
  }
  const trt::Fields* field_names() noexcept override { return tensorrt::field_names(index_); }
  const char* name() const noexcept override { return KVG_OPS[index_]->name; }
  const char* version() const noexcept override { return kPluginVersion; }
  const char* name_space() const noexcept override { return KVG_DOMAIN; }

 private:
  const int index_;
};

const kvg_op& op_of(const char* name) {
  for (const kvg_op* op : KVG_OPS)
    if (name && !std::strcmp(op->name, name)) return *op;
  refuse(KVG_REFUSED, "op: expected one of domain %s, got \"%.100s\"", KVG_DOMAIN, name ? name : "");
}

std::string describe(const Plan& plan) {
  std::string text;
  for (const Launch& launch : plan.launches) {
    text += kRoleNames[launch.role];
    for (int64_t number : launch.grid) text += " " + std::to_string(number);
    for (int64_t number : launch.values) text += " " + std::to_string(number);
    text += "\n";
  }
  return text + "scratch " + std::to_string(plan.scratch[kPartialOut]) + " " +
         std::to_string(plan.scratch[kPartialState]) + "\n";
}

std::string plan_text(const char* name, const char* text, const char* arch, const int64_t* given) {
  const kvg_op& op = op_of(name);
  const Kernels kernels = parse_kernels(op, text, true);
  const cuda::Arch wanted = cuda::parse_arch(arch);
  const ArchKernels& found = kernels.on(wanted.major, wanted.minor);
  const Sizes sizes{given[0], given[1], given[2], given[3], given[4]};
  const ScratchBound bound = bound_scratch(found.tiling, sizes);
  return describe(plan_step(found.tiling, sizes, given[5], given[6], given[7])) + "bound " +
         std::to_string(bound.elements[kPartialOut]) + " " +
         std::to_string(bound.elements[kPartialState]) + "\n";
}

}  // namespace
}  // namespace kvg::tensorrt

using namespace kvg::tensorrt;

extern "C" {

KVG_LAUNCH_EXPORT trt::Creator* const* getCreators(int32_t& count) {
  static Creator creators[KVG_NUM_OPS] = {Creator(0), Creator(1), Creator(2)};
  static trt::Creator* const list[KVG_NUM_OPS] = {&creators[0], &creators[1], &creators[2]};
  count = KVG_NUM_OPS;
  return list;
}

KVG_LAUNCH_EXPORT void setLoggerFinder(trt::LoggerFinder* finder) { use_logger_finder(finder); }

// The sentence with which a plugin of this process refused last; empty if none did.
KVG_LAUNCH_EXPORT void kvg_tensorrt_message(char* message, size_t message_size) {
  kvg::cuda::say(last_sentence().c_str(), message, message_size);
}

// The launches of a step as text, one a line: role, grid, values in the order of plan.h; then the
// scratch elements that it uses, and those that any step up to these sizes may use.
// `sizes`: batch_size, total_seq_len, max_new, max_context, table_width, layer, stores, attends.
KVG_LAUNCH_EXPORT int32_t kvg_tensorrt_plan(const char* op, const char* kernels, const char* arch,
                                            const int64_t* sizes, char* text, size_t text_size,
                                            char* message, size_t message_size) {
  return kvg::cuda::entry(message, message_size, [&] {
    kvg::cuda::say(plan_text(op, kernels, arch, sizes).c_str(), text, text_size);
  });
}

}  // extern "C"
