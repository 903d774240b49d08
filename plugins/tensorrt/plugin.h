// An op of domain "kvgraph" as a TensorRT plugin, generic over the tables of contract.h.
#pragma once

#include <memory>

#include "tensorrt/settings.h"

namespace kvg::tensorrt {

constexpr char kPluginVersion[] = "1";

// Each base class implements `info` for its interface.
class Plugin final : public trt::Plugin,
                     public trt::PluginCore,
                     public trt::PluginBuild,
                     public trt::PluginRuntime {
 public:
  Plugin(std::shared_ptr<const Settings> settings, trt::Phase phase);

  trt::Capable* capability(trt::Capability type) noexcept override;
  trt::Plugin* clone() noexcept override;

  const char* name() const noexcept override { return settings_->op->name; }
  const char* version() const noexcept override { return kPluginVersion; }
  const char* name_space() const noexcept override { return KVG_DOMAIN; }

  int32_t configure(const trt::DynamicTensorDesc* in, int32_t num_in,
                    const trt::DynamicTensorDesc* out, int32_t num_out) noexcept override;
  int32_t output_types(trt::DataType* out, int32_t num_out, const trt::DataType* in,
                       int32_t num_in) const noexcept override;
  int32_t output_shapes(const trt::DimsExprs* in, int32_t num_in, const trt::DimsExprs* values,
                        int32_t num_values, trt::DimsExprs* out, int32_t num_out,
                        trt::ExprBuilder& builder) noexcept override;
  bool supports_format(int32_t position, const trt::DynamicTensorDesc* in_out, int32_t num_in,
                       int32_t num_out) noexcept override;
  int32_t num_outputs() const noexcept override { return settings_->num_outputs(); }
  size_t workspace_size(const trt::DynamicTensorDesc* in, int32_t num_in,
                        const trt::DynamicTensorDesc* out, int32_t num_out) const noexcept override;
  int32_t aliased_input(int32_t output) noexcept override;

  int32_t on_shape_change(const trt::TensorDesc* in, int32_t num_in, const trt::TensorDesc* out,
                          int32_t num_out) noexcept override;
  int32_t enqueue(const trt::TensorDesc* in_desc, const trt::TensorDesc* out_desc,
                  const void* const* in, void* const* out, void* workspace,
                  trt::Stream* stream) noexcept override;
  trt::Plugin* attach(trt::ResourceContext* context) noexcept override;
  const trt::Fields* fields_to_serialize() noexcept override { return serialized_->fields(); }

 private:
  std::shared_ptr<const Settings> settings_;
  std::shared_ptr<const Serialized> serialized_;
  trt::Phase phase_;       // the same in clones; kRuntime in plugins of a deserialized engine
  launch::Device device_;  // not shared with clones: each execution context has its own
};

}  // namespace kvg::tensorrt
