// Calls every method of a TensorRT plugin as TensorRT does, through the interfaces of
// plugins/abi/tensorrt.h, for tests that have no TensorRT: a host of its own, with C entry points.
#include <cstring>
#include <deque>
#include <string>
#include <vector>

#include "abi/tensorrt.h"

extern "C" trt::Creator* const* getCreators(int32_t& count);
extern "C" void setLoggerFinder(trt::LoggerFinder* finder);

namespace {

// ---- a host's expressions and logger ------------------------------------------------------------

struct Extent : trt::Dimension {
  struct Impl : trt::DimensionImpl {
    int64_t number;  // -1: known at run time only
    explicit Impl(int64_t n) : number(n) {}
    bool is_constant() const override { return number >= 0; }
    int64_t value() const override { return number >= 0 ? number : INT64_MIN; }
    bool is_size_tensor() const override { return false; }
  };
  explicit Extent(int64_t n) : trt::Dimension(&mine), mine(n) {}
  Impl mine;
};

struct Host : trt::ExprBuilder {
  struct Impl : trt::BuilderImpl {
    std::deque<Extent> made;
    const trt::Dimension* constant(int64_t value) override {
      made.emplace_back(value);
      return &made.back();
    }
  };
  Host() : trt::ExprBuilder(&mine) {}
  Impl mine;
};

struct Recorder : trt::Logger, trt::LoggerFinder {
  std::string text;
  bool present = true;
  void log(trt::Severity severity, const char* message) noexcept override {
    text += std::to_string(static_cast<int>(severity)) + " " + message + "\n";
  }
  trt::Logger* find() override { return present ? this : nullptr; }
} g_recorder;

trt::PluginBuild* build(trt::Plugin* plugin) {
  return static_cast<trt::PluginBuild*>(plugin->capability(trt::Capability::kBuild));
}
trt::PluginRuntime* runtime(trt::Plugin* plugin) {
  return static_cast<trt::PluginRuntime*>(plugin->capability(trt::Capability::kRuntime));
}
trt::PluginCore* core(trt::Plugin* plugin) {
  return static_cast<trt::PluginCore*>(plugin->capability(trt::Capability::kCore));
}

trt::Dims dims_of(const int64_t* row) {  // rank, then extents
  trt::Dims dims{static_cast<int32_t>(row[0]), {}};
  for (int i = 0; i < dims.count; ++i) dims.extent[i] = row[1 + i];
  return dims;
}

std::vector<trt::TensorDesc> descs(const int64_t* shapes, const int32_t* types, int count) {
  std::vector<trt::TensorDesc> made;
  for (int i = 0; i < count; ++i)
    made.push_back({dims_of(shapes + 9 * i), static_cast<trt::DataType>(types[i]),
                    trt::Format::kLinear, -1.f});
  return made;
}

std::vector<trt::DynamicTensorDesc> dynamic(const int64_t* shapes, const int32_t* types, int count) {
  std::vector<trt::DynamicTensorDesc> made;
  for (const trt::TensorDesc& desc : descs(shapes, types, count))
    made.push_back({desc, desc.dims, desc.dims, desc.dims});
  return made;
}

}  // namespace

extern "C" {

const char* h_log(bool present) {
  g_recorder.present = present;
  setLoggerFinder(&g_recorder);
  return g_recorder.text.c_str();
}

int32_t h_creators(char* names, size_t size) {
  int32_t count = 0;
  trt::Creator* const* creators = getCreators(count);
  std::string text;
  for (int i = 0; i < count; ++i) {
    trt::Creator* c = creators[i];
    text += std::string(c->info().kind) + "|" + c->name_space() + "|" + c->name() + "|" + c->version();
    for (int f = 0; f < c->field_names()->count; ++f)
      text += std::string("|") + c->field_names()->fields[f].name;
    text += "\n";
  }
  strncpy(names, text.c_str(), size - 1);
  return count;
}

// Fields as parallel arrays. Null: refused.
trt::Plugin* h_create(const char* op, int32_t phase, int32_t count, const char* const* names,
                      const int32_t* types, const int32_t* lengths, const void* const* data) {
  std::vector<trt::Field> list;
  for (int i = 0; i < count; ++i)
    list.push_back({names[i], data[i], static_cast<trt::FieldType>(types[i]), lengths[i]});
  const trt::Fields fields{count, list.data()};
  int32_t creators = 0;
  trt::Creator* const* all = getCreators(creators);
  for (int i = 0; i < creators; ++i)
    if (!strcmp(all[i]->name(), op)) return all[i]->create("node", &fields, static_cast<trt::Phase>(phase));
  return nullptr;
}

// As TensorRT writes an engine and reads it again: a new plugin of the serialised fields' copies.
trt::Plugin* h_reload(trt::Plugin* plugin, const char* op) {
  const trt::Fields* fields = runtime(plugin)->fields_to_serialize();
  std::deque<std::string> bytes;
  std::vector<trt::Field> list;
  for (int i = 0; i < fields->count; ++i) {
    const trt::Field& f = fields->fields[i];
    const bool eight = f.type == trt::FieldType::kInt64 || f.type == trt::FieldType::kFloat64;
    const bool four = f.type == trt::FieldType::kInt32 || f.type == trt::FieldType::kFloat32;
    bytes.emplace_back(static_cast<const char*>(f.data), static_cast<size_t>(f.length) * (eight ? 8 : four ? 4 : 1));
    list.push_back({f.name, bytes.back().data(), f.type, f.length});
  }
  const trt::Fields copy{fields->count, list.data()};
  int32_t creators = 0;
  trt::Creator* const* all = getCreators(creators);
  trt::Plugin* made = nullptr;
  for (int i = 0; i < creators; ++i)
    if (!strcmp(all[i]->name(), op)) made = all[i]->create("node", &copy, trt::Phase::kRuntime);
  for (std::string& data : bytes) data.assign(data.size(), '?');  // TensorRT keeps nothing
  return made;
}

void h_serialized(trt::Plugin* plugin, char* text, size_t size) {
  const trt::Fields* fields = runtime(plugin)->fields_to_serialize();
  std::string said;
  for (int i = 0; i < fields->count; ++i)
    said += std::string(fields->fields[i].name) + " " + std::to_string(static_cast<int>(fields->fields[i].type)) +
            " " + std::to_string(fields->fields[i].length) + "\n";
  strncpy(text, said.c_str(), size - 1);
}

trt::Plugin* h_clone(trt::Plugin* plugin) { return plugin->clone(); }
trt::Plugin* h_attach(trt::Plugin* plugin) { return runtime(plugin)->attach(nullptr); }
void h_delete(trt::Plugin* plugin) { delete plugin; }
int32_t h_num_outputs(trt::Plugin* plugin) { return build(plugin)->num_outputs(); }
int32_t h_aliased(trt::Plugin* plugin, int32_t output) { return build(plugin)->aliased_input(output); }

void h_names(trt::Plugin* plugin, char* text, size_t size) {
  std::string said = std::string(core(plugin)->name_space()) + "|" + core(plugin)->name() + "|" + core(plugin)->version();
  for (const trt::Versioned* part : std::initializer_list<trt::Versioned*>{plugin, core(plugin), build(plugin), runtime(plugin)})
    said += std::string("|") + part->info().kind + " " + std::to_string(part->info().major);
  strncpy(text, said.c_str(), size - 1);
}

int32_t h_types(trt::Plugin* plugin, int32_t* out, int32_t num_out, const int32_t* in, int32_t num_in) {
  return build(plugin)->output_types(reinterpret_cast<trt::DataType*>(out), num_out,
                                     reinterpret_cast<const trt::DataType*>(in), num_in);
}

// Shapes are rows of nine: rank, then extents (-1: dynamic; an output's: -2 - input * 8 - axis for
// the dim of an input).
int32_t h_shapes(trt::Plugin* plugin, const int64_t* in, int32_t num_in, int64_t* out, int32_t num_out) {
  std::deque<Extent> extents;
  std::vector<trt::DimsExprs> given, made(num_out);
  for (int i = 0; i < num_in; ++i) {
    trt::DimsExprs dims{static_cast<int32_t>(in[9 * i]), {}};
    for (int axis = 0; axis < dims.count; ++axis) {
      extents.emplace_back(in[9 * i + 1 + axis]);
      dims.extent[axis] = &extents.back();
    }
    given.push_back(dims);
  }
  Host host;
  const int32_t status = build(plugin)->output_shapes(given.data(), num_in, nullptr, 0, made.data(), num_out, host);
  for (int o = 0; o < num_out && !status; ++o) {
    out[9 * o] = made[o].count;
    for (int axis = 0; axis < made[o].count; ++axis) {
      const trt::Dimension* found = made[o].extent[axis];
      int64_t said = found->value();
      if (!found->is_constant())
        for (int i = 0; i < num_in; ++i)
          for (int a = 0; a < given[i].count; ++a)
            if (given[i].extent[a] == found) said = -2 - i * 8 - a;
      out[9 * o + 1 + axis] = said;
    }
  }
  return status;
}

bool h_format(trt::Plugin* plugin, int32_t position, int32_t type, int32_t format, int32_t num_in, int32_t num_out) {
  std::vector<trt::DynamicTensorDesc> all(num_in + num_out);
  all[position].desc.type = static_cast<trt::DataType>(type);
  all[position].desc.format = static_cast<trt::Format>(format);
  return build(plugin)->supports_format(position, all.data(), num_in, num_out);
}

int32_t h_configure(trt::Plugin* plugin, const int64_t* shapes, const int32_t* types, int32_t num_in, int32_t num_out) {
  const auto in = dynamic(shapes, types, num_in);
  return build(plugin)->configure(in.data(), num_in, in.data(), num_out);
}

size_t h_workspace(trt::Plugin* plugin, const int64_t* shapes, const int32_t* types, int32_t num_in, int32_t num_out) {
  const auto in = dynamic(shapes, types, num_in);
  return build(plugin)->workspace_size(in.data(), num_in, in.data(), num_out);
}

int32_t h_enqueue(trt::Plugin* plugin, const int64_t* shapes, const int32_t* types, int32_t num_in,
                  const void* const* in, int32_t num_out, void* const* out, void* workspace, void* stream) {
  const auto desc = descs(shapes, types, num_in);
  std::vector<trt::TensorDesc> out_desc(num_out);
  trt::PluginRuntime* const part = runtime(plugin);
  if (part->on_shape_change(desc.data(), num_in, out_desc.data(), num_out)) return 2;
  return part->enqueue(desc.data(), out_desc.data(), in, out, workspace, static_cast<trt::Stream*>(stream));
}

}  // extern "C"
