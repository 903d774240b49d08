// A host of ONNX Runtime's custom ops for tests that have no CUDA provider: a table of functions of
// our own that registers kvgraph's library, makes kernels of nodes and runs them over tensors that are
// addresses alone. A function that the table lacks ends the process.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <new>
#include <string>
#include <vector>

#include "abi/onnxruntime.h"

extern "C" ort::Status* RegisterCustomOps(ort::SessionOptions*, const ort::ApiBase*);

namespace ort {
struct Status {
  ErrorCode code;
  std::string text;
};
struct Value {
  int32_t type;
  std::vector<int64_t> dims;
  void* data;
};
struct KernelInfo {
  std::map<std::string, std::string> tensors;
  std::map<std::string, double> numbers;
};
struct KernelContext {
  std::vector<const Value*> inputs;
  std::vector<Value> outputs;
  void* stream;
};
struct CustomOpDomain {
  std::string name;
  std::vector<const CustomOp*> ops;
};
struct MemoryInfo {
  int device;
};
}  // namespace ort

namespace {
size_t g_memory = SIZE_MAX;  // of one allocation, while the library makes kernels or registers
bool g_is_short = false;
}  // namespace

void* operator new(size_t bytes) {
  void* made = g_is_short && bytes >= g_memory ? nullptr : std::malloc(bytes);
  if (!made) throw std::bad_alloc();
  return made;
}
void operator delete(void* made) noexcept { std::free(made); }
void operator delete(void* made, size_t) noexcept { std::free(made); }

namespace {

using namespace ort;

std::string g_log;  // of scratch memory, allocators and outputs
CustomOpDomain g_domain;
int g_statuses = 0, g_values = 0;  // alive
bool g_no_scratch = false;
const MemoryInfo kMemory{0};
Allocator g_host{21, nullptr, nullptr, nullptr};
int32_t g_bytes = 2;  // element type of attributes: uint8
uintptr_t g_scratch = 0x7000000;

Status* status(ErrorCode code, const char* text) {
  ++g_statuses;
  return new Status{code, text};
}
[[noreturn]] void missing() {
  fputs("the library calls a function that this host lacks\n", stderr);
  abort();
}

Status* create_domain(const char* name, CustomOpDomain** out) {
  g_domain.name = name;
  *out = &g_domain;
  return nullptr;
}
Status* add_op(CustomOpDomain* domain, const CustomOp* op) {
  domain->ops.push_back(op);
  return nullptr;
}
Status* describe(const Value* value, ElementType* type, const int64_t** dims, size_t* rank) {
  *type = static_cast<ElementType>(value->type);
  *dims = value->dims.data(), *rank = value->dims.size();
  return nullptr;
}
template <class Number>
Status* number(const KernelInfo* info, const char* name, Number* out) {
  const auto found = info->numbers.find(name);
  if (found == info->numbers.end())
    return status(kFail, (std::string("no attribute ") + name).c_str());
  *out = static_cast<Number>(found->second);
  return nullptr;
}
Status* tensor(const KernelInfo* info, const char* name, Allocator* host, Value** out) {
  const auto found = info->tensors.find(name);
  if (info->numbers.count(name)) return status(kFail, "expected to have type: TENSOR");
  if (found == info->tensors.end() || host != &g_host)
    return status(kFail, (std::string("no attribute ") + name).c_str());
  ++g_values;
  const auto size = static_cast<int64_t>(found->second.size());
  *out = new Value{g_bytes, {size}, const_cast<char*>(found->second.data())};
  return nullptr;
}
Status* output(KernelContext* context, size_t index, const int64_t* dims, size_t rank, Value** out) {
  Value& value = context->outputs[index];
  value.dims.assign(dims, dims + rank);
  g_log += "output " + std::to_string(index);
  for (int64_t dim : value.dims) g_log += " " + std::to_string(dim);
  g_log += "\n";
  *out = value.data ? &value : nullptr;
  return nullptr;
}
void free_scratch(Allocator*, void* data) {
  g_log += "free " + std::to_string(reinterpret_cast<uintptr_t>(data) - g_scratch) + "\n";
}
Allocator g_allocator{21, nullptr, free_scratch, [](const Allocator*) { return &kMemory; }};
Status* allocator(const KernelInfo*, MemoryType type, Allocator** out) {
  g_log += "allocator " + std::to_string(type) + "\n";
  *out = &g_allocator;
  return nullptr;
}
Status* scratch(const KernelContext*, const MemoryInfo* memory, size_t bytes, void** out) {
  if (g_no_scratch) return status(kFail, "out of device memory");
  if (memory != &kMemory) return status(kFail, "another memory");
  g_log += "scratch " + std::to_string(bytes) + "\n";
  *out = reinterpret_cast<void*>(g_scratch);
  return nullptr;
}

struct Table {
  void* slots[415];

  Table() {
    for (void*& slot : slots) slot = reinterpret_cast<void*>(missing);
    slots[0] = reinterpret_cast<void*>(status);
    slots[2] = reinterpret_cast<void*>(+[](const Status* s) { return s->text.c_str(); });
    slots[26] = reinterpret_cast<void*>(create_domain);
    slots[27] = reinterpret_cast<void*>(add_op);
    slots[28] = reinterpret_cast<void*>(+[](SessionOptions*, CustomOpDomain*) -> Status* { return nullptr; });
    slots[51] = reinterpret_cast<void*>(+[](Value* value, void** out) -> Status* {
      *out = value->data;
      return nullptr;
    });
    slots[78] = reinterpret_cast<void*>(+[](Allocator** out) -> Status* {
      *out = &g_host;
      return nullptr;
    });
    slots[85] = reinterpret_cast<void*>(number<float>);
    slots[86] = reinterpret_cast<void*>(number<int64_t>);
    slots[88] = reinterpret_cast<void*>(+[](const KernelContext* context, size_t* out) -> Status* {
      *out = context->inputs.size();
      return nullptr;
    });
    slots[89] = reinterpret_cast<void*>(+[](const KernelContext* context, size_t* out) -> Status* {
      *out = context->outputs.size();
      return nullptr;
    });
    slots[90] = reinterpret_cast<void*>(+[](const KernelContext* context, size_t i, const Value** out) -> Status* {
      *out = context->inputs[i];
      return nullptr;
    });
    slots[91] = reinterpret_cast<void*>(output);
    slots[93] = reinterpret_cast<void*>(+[](Status* s) {
      --g_statuses;
      delete s;
    });
    slots[96] = reinterpret_cast<void*>(+[](Value* value) {
      --g_values;
      delete value;
    });
    slots[132] = reinterpret_cast<void*>(+[](Allocator*) { g_log += "release\n"; });
    slots[193] = reinterpret_cast<void*>(+[](const KernelContext* context, void** out) -> Status* {
      *out = context->stream;
      return nullptr;
    });
    slots[236] = reinterpret_cast<void*>(tensor);
    slots[249] = reinterpret_cast<void*>(
        +[](const KernelInfo*, size_t, int* is_constant, const Value**) -> Status* {
          *is_constant = 0;
          return nullptr;
        });
    slots[277] = reinterpret_cast<void*>(scratch);
    slots[278] = reinterpret_cast<void*>(allocator);
    slots[414] = reinterpret_cast<void*>(describe);
  }
};
const Table g_table;
uint32_t g_newest = 24;
std::string g_version;

const ApiBase kBase{[](uint32_t version) {
                      return version <= g_newest ? reinterpret_cast<const Api*>(&g_table) : nullptr;
                    },
                    [] { return g_version.c_str(); }};

std::string g_said;

// Takes a status over: whether it refuses.
bool refuses(Status* given) {
  g_said = given ? given->text : "";
  if (given) --g_statuses;
  delete given;
  return !g_said.empty();
}

struct Made {
  const CustomOp* op;
  void* kernel;
};

}  // namespace

extern "C" {

const char* o_said() { return g_said.c_str(); }
const char* o_log() { return g_log.c_str(); }
int32_t o_alive() { return g_statuses + g_values; }
void o_no_scratch(bool gone) { g_no_scratch = gone; }
void o_bytes(int32_t type) { g_bytes = type; }
// Kernels and registrations get no memory in pieces of so many bytes or more.
void o_memory(size_t bytes) { g_memory = bytes; }
void o_scratch(uintptr_t address) { g_scratch = address; }

// Registers with a runtime of that version, whose newest API is that one; false: refused.
bool o_register(uint32_t newest, const char* version) {
  g_newest = newest, g_version = version;
  g_is_short = true;
  Status* said = RegisterCustomOps(nullptr, &kBase);
  g_is_short = false;
  return !refuses(said);
}

// A line for each registration: op, provider, input types, memory of the inputs, aliases.
const char* o_ops() {
  static std::string said;
  said.clear();
  for (const CustomOp* op : g_domain.ops) {
    said += g_domain.name + "|" + op->GetName(op) + "|" + op->GetExecutionProviderType(op) + "|";
    const size_t inputs = op->GetInputTypeCount(op);
    for (size_t i = 0; i < inputs; ++i) said += (i ? "," : "") + std::to_string(op->GetInputType(op, i));
    said += "|";
    for (size_t i = 0; i < inputs; ++i)
      said += (i ? "," : "") + std::to_string(op->GetInputMemoryType(op, i));
    said += "|";
    int *from = nullptr, *to = nullptr;
    const size_t count = op->GetAliasMap(&from, &to);
    for (size_t i = 0; i < count; ++i)
      said += (i ? "," : "") + std::to_string(from[i]) + ">" + std::to_string(to[i]);
    // ONNX Runtime gives back no arrays of a count of 0.
    if (count) op->ReleaseAliasMap(from, to);
    else if (from || to) said += "left over";
    said += "\n";
  }
  return said.c_str();
}

// A kernel of the registration at that line; null: refused. Attributes are numbers, or bytes of a
// tensor.
Made* o_create(int32_t line, int32_t count, const char* const* names, const double* numbers,
               const char* const* bytes, const int64_t* sizes) {
  KernelInfo info;
  for (int32_t i = 0; i < count; ++i)
    if (bytes[i])
      info.tensors[names[i]].assign(bytes[i], static_cast<size_t>(sizes[i]));
    else
      info.numbers[names[i]] = numbers[i];
  const CustomOp* op = g_domain.ops[static_cast<size_t>(line)];
  void* kernel = nullptr;
  g_is_short = true;
  Status* said = op->CreateKernelV2(op, reinterpret_cast<const Api*>(&g_table), &info, &kernel);
  g_is_short = false;
  if (refuses(said)) return nullptr;
  return new Made{op, kernel};
}

void o_destroy(Made* made) {
  made->op->KernelDestroy(made->kernel);
  delete made;
}

// Tensors as rows of nine: rank, then extents; type 0: left out.
bool o_compute(Made* made, int32_t inputs, const int64_t* shapes, const int32_t* types,
               void* const* data, int32_t outputs, const int32_t* out_types, void* const* out,
               void* stream) {
  std::vector<Value> values;
  for (int32_t i = 0; i < inputs; ++i) {
    const int64_t* row = shapes + 9 * i;
    values.push_back({types[i], {row + 1, row + 1 + row[0]}, data[i]});
  }
  KernelContext context{{}, {}, stream};
  for (const Value& value : values) context.inputs.push_back(value.type ? &value : nullptr);
  for (int32_t i = 0; i < outputs; ++i) context.outputs.push_back({out_types[i], {}, out[i]});
  return !refuses(made->op->KernelComputeV2(made->kernel, &context));
}

}  // extern "C"
