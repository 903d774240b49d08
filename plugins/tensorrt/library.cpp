// The functions that TensorRT finds in this library by name, and one for kvgraph's tools and tests.
#include <new>

#include "kvgraph/launch.h"
#include "tensorrt/plugin.h"
#include "tensorrt/report.h"

namespace kvg::tensorrt {
namespace {

class Creator final : public trt::Creator {
 public:
  explicit Creator(int op_index) : index_(op_index) {}

  trt::Plugin* create(const char*, const trt::Fields* fields, trt::Phase phase) noexcept override {
    trt::Plugin* made = nullptr;
    guarded([&] { made = new Plugin(read_settings(*KVG_OPS[index_], fields), phase); });
    return made;
  }
  const trt::Fields* field_names() noexcept override { return tensorrt::field_names(index_); }
  const char* name() const noexcept override { return KVG_OPS[index_]->name; }
  const char* version() const noexcept override { return kPluginVersion; }
  const char* name_space() const noexcept override { return KVG_DOMAIN; }

 private:
  const int index_;
};

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

// Writes the last refusal of a plugin of this process to `message`; empty if there was none.
KVG_LAUNCH_EXPORT void kvg_tensorrt_message(char* message, size_t message_size) {
  kvg::entry(message, message_size,
             [&] { kvg::say(last_sentence().c_str(), message, message_size); });
}

}  // extern "C"
