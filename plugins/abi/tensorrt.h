// The part of TensorRT's plugin interface that kvgraph uses, declared by us from its documentation
// (TensorRT 10 and 11, TensorRT-RTX 1.7 and later): no vendor header is needed to build.
//
// An interface is a class of virtual methods. Their order and signatures are the binary interface,
// which stays stable because the vendor versions every interface that changes. Where the vendor's
// headers are given (CMake's KVG_TENSORRT_INCLUDE), tensorrt/conformance.cpp compares both.
#pragma once

#include <cstddef>
#include <cstdint>

namespace trt {

struct Stream;  // CUstream_st

enum class DataType : int32_t {
  kFLOAT = 0,
  kHALF = 1,
  kINT8 = 2,
  kINT32 = 3,
  kFP8 = 6,
  kBF16 = 7,
  kINT64 = 8,
};

enum class Format : int32_t { kLinear = 0 };

constexpr int32_t kMaxDims = 8;

struct Dims {
  int32_t count;
  int64_t extent[kMaxDims];  // -1: known at run time only
};

struct TensorDesc {
  Dims dims;
  DataType type;
  Format format;
  float scale;
};

struct DynamicTensorDesc {
  TensorDesc desc;
  Dims min, max, opt;
};

enum class FieldType : int32_t {
  kFloat32 = 1,
  kFloat64 = 2,
  kInt8 = 3,
  kInt32 = 5,
  kChar = 6,
  kUnknown = 8,
  kInt64 = 10,
};

struct Field {
  const char* name;
  const void* data;
  FieldType type;
  int32_t length;  // in elements
};

struct Fields {
  int32_t count;
  const Field* fields;
};

enum class Phase : int32_t { kBuild = 0, kRuntime = 1 };
enum class Capability : int32_t { kCore = 0, kBuild = 1, kRuntime = 2 };
enum class Language : int32_t { kCpp = 0 };

struct InterfaceInfo {
  const char* kind;
  int32_t major, minor;
};

class Versioned {
 public:
  virtual Language language() const noexcept { return Language::kCpp; }
  virtual InterfaceInfo info() const noexcept = 0;
  virtual ~Versioned() noexcept = default;
};

// ---- expressions over the extents of inputs ---------------------------------------------------

// Interface that the host implements; Dimension, which plugins see, holds a pointer to it.
class DimensionImpl {
 public:
  virtual ~DimensionImpl() noexcept = default;
  virtual bool is_constant() const = 0;
  virtual int64_t value() const = 0;
  virtual bool is_size_tensor() const = 0;
};

class Dimension {
 public:
  bool is_constant() const { return impl_->is_constant(); }
  int64_t value() const { return impl_->value(); }

 protected:
  explicit Dimension(DimensionImpl* impl) : impl_(impl) {}
  virtual ~Dimension() noexcept = default;
  DimensionImpl* impl_;
};

class BuilderImpl {
 public:
  virtual ~BuilderImpl() noexcept = default;
  virtual const Dimension* constant(int64_t value) = 0;
};

class ExprBuilder {
 public:
  const Dimension* constant(int64_t value) { return impl_->constant(value); }

 protected:
  explicit ExprBuilder(BuilderImpl* impl) : impl_(impl) {}
  virtual ~ExprBuilder() noexcept = default;
  BuilderImpl* impl_;
};

struct DimsExprs {
  int32_t count;
  const Dimension* extent[kMaxDims];
};

// ---- a plugin: three capabilities of one object -------------------------------------------------

class Capable : public Versioned {};

class Plugin : public Versioned {
 public:
  InterfaceInfo info() const noexcept override { return {"PLUGIN", 1, 0}; }
  virtual Capable* capability(Capability type) noexcept = 0;
  virtual Plugin* clone() noexcept = 0;
};

class PluginCore : public Capable {
 public:
  InterfaceInfo info() const noexcept override { return {"PLUGIN_V3ONE_CORE", 1, 0}; }
  virtual const char* name() const noexcept = 0;
  virtual const char* version() const noexcept = 0;
  virtual const char* name_space() const noexcept = 0;
};

// Methods return 0 for success.
class PluginBuild : public Capable {
 public:
  InterfaceInfo info() const noexcept override { return {"PLUGIN_V3ONE_BUILD", 2, 0}; }
  virtual int32_t configure(const DynamicTensorDesc* in, int32_t num_in,
                            const DynamicTensorDesc* out, int32_t num_out) noexcept = 0;
  virtual int32_t output_types(DataType* out, int32_t num_out, const DataType* in,
                               int32_t num_in) const noexcept = 0;
  virtual int32_t output_shapes(const DimsExprs* in, int32_t num_in, const DimsExprs* values,
                                int32_t num_values, DimsExprs* out, int32_t num_out,
                                ExprBuilder& builder) noexcept = 0;
  virtual bool supports_format(int32_t position, const DynamicTensorDesc* in_out, int32_t num_in,
                               int32_t num_out) noexcept = 0;
  virtual int32_t num_outputs() const noexcept = 0;
  virtual size_t workspace_size(const DynamicTensorDesc* in, int32_t num_in,
                                const DynamicTensorDesc* out, int32_t num_out) const noexcept = 0;
  virtual int32_t valid_tactics(int32_t*, int32_t) noexcept { return 0; }
  virtual int32_t num_tactics() noexcept { return 0; }
  virtual const char* timing_cache_id() noexcept { return nullptr; }
  virtual int32_t format_combination_limit() noexcept { return 100; }
  virtual const char* metadata() noexcept { return nullptr; }
  // Version 2 of the interface: the input that shares its memory with the output, or -1.
  virtual int32_t aliased_input(int32_t output) noexcept = 0;
};

class ResourceContext;

class PluginRuntime : public Capable {
 public:
  InterfaceInfo info() const noexcept override { return {"PLUGIN_V3ONE_RUNTIME", 1, 0}; }
  virtual int32_t set_tactic(int32_t) noexcept { return 0; }
  virtual int32_t on_shape_change(const TensorDesc* in, int32_t num_in, const TensorDesc* out,
                                  int32_t num_out) noexcept = 0;
  virtual int32_t enqueue(const TensorDesc* in_desc, const TensorDesc* out_desc,
                          const void* const* in, void* const* out, void* workspace,
                          Stream* stream) noexcept = 0;
  virtual Plugin* attach(ResourceContext* context) noexcept = 0;
  virtual const Fields* fields_to_serialize() noexcept = 0;
};

class Creator : public Versioned {
 public:
  InterfaceInfo info() const noexcept override { return {"PLUGIN CREATOR_V3ONE", 1, 0}; }
  virtual Plugin* create(const char* name, const Fields* fields, Phase phase) noexcept = 0;
  virtual const Fields* field_names() noexcept = 0;
  virtual const char* name() const noexcept = 0;
  virtual const char* version() const noexcept = 0;
  virtual const char* name_space() const noexcept = 0;
};

// ---- what the host gives a plugin library -------------------------------------------------------

enum class Severity : int32_t { kInternalError = 0, kError = 1, kWarning = 2, kInfo = 3 };

class Logger {
 public:
  virtual void log(Severity severity, const char* message) noexcept = 0;

 protected:
  ~Logger() = default;
};

class LoggerFinder {
 public:
  virtual Logger* find() = 0;

 protected:
  ~LoggerFinder() = default;
};

}  // namespace trt
