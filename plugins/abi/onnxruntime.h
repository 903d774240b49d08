// The part of ONNX Runtime's C interface that kvgraph uses, declared by us from its documented
// layout. The table of functions is append-only, so slot numbers never change. tests/plugins and
// tests/test_conformance.py run every slot below against the installed runtime except
// ScratchBuffer, which needs a GPU's stream.
#pragma once

#include <cstddef>
#include <cstdint>

namespace ort {

// The version of the interface that is requested, not the oldest runtime: see kOldestMinor.
constexpr uint32_t kApiVersion = 24;
// The version of the callbacks of a custom op, below.
constexpr uint32_t kCustomOpVersion = 21;
// The oldest runtime of major version 1 that runs artifacts: those before it do not know their
// opset, or crash at an operand left out before the last.
constexpr int kOldestMinor = 28;

struct Status;
struct SessionOptions;
struct CustomOpDomain;
struct Value;
struct TensorInfo;
struct KernelInfo;
struct KernelContext;
struct ShapeContext;
struct OpAttribute;
struct MemoryInfo;

enum ElementType : int32_t {
  kUndefined = 0,
  kFloat = 1,
  kUint8 = 2,
  kInt8 = 3,
  kInt32 = 6,
  kFloat16 = 10,
  kBFloat16 = 16,
  kFloat8E4M3FN = 17,
};
enum Characteristic : int32_t { kRequired = 0, kOptional = 1 };
enum ErrorCode : int32_t { kFail = 1, kInvalidArgument = 2 };
enum AttributeType : int32_t { kAttributeInt = 1 };
enum MemoryType : int32_t { kCpuInput = -2, kDefaultMemory = 0 };

struct CustomOp;

// Allocator of a provider's memory. Fields after these belong to newer versions.
struct Allocator {
  uint32_t version;
  void* (*Alloc)(Allocator*, size_t);
  void (*Free)(Allocator*, void*);
  const MemoryInfo* (*Info)(const Allocator*);
};

// A function of the table, named by its slot number.
template <size_t Slot, class Signature>
struct Function;

struct Api;  // opaque: an array of function pointers

template <size_t Slot, class R, class... A>
struct Function<Slot, R(A...)> {
  static R call(const Api* api, A... arguments) {
    auto* table = reinterpret_cast<void* const*>(api);
    return reinterpret_cast<R (*)(A...)>(table[Slot])(arguments...);
  }
};

using CreateStatus = Function<0, Status*(ErrorCode, const char*)>;
using ErrorMessage = Function<2, const char*(const Status*)>;
using CreateCustomOpDomain = Function<26, Status*(const char*, CustomOpDomain**)>;
using AddToDomain = Function<27, Status*(CustomOpDomain*, const CustomOp*)>;
using AddDomain = Function<28, Status*(SessionOptions*, CustomOpDomain*)>;
using TensorData = Function<51, Status*(Value*, void**)>;
using CreateTensorInfo = Function<57, Status*(TensorInfo**)>;
using SetElementType = Function<58, Status*(TensorInfo*, ElementType)>;
using SetDimensions = Function<59, Status*(TensorInfo*, const int64_t*, size_t)>;
using TensorElementType = Function<60, Status*(const TensorInfo*, ElementType*)>;
using DimensionsCount = Function<61, Status*(const TensorInfo*, size_t*)>;
using Dimensions = Function<62, Status*(const TensorInfo*, int64_t*, size_t)>;
using SymbolicDimensions = Function<63, Status*(const TensorInfo*, const char**, size_t)>;
using DefaultAllocator = Function<78, Status*(Allocator**)>;  // for host memory; not released
using AttributeFloat = Function<85, Status*(const KernelInfo*, const char*, float*)>;
using AttributeInt = Function<86, Status*(const KernelInfo*, const char*, int64_t*)>;
using InputCount = Function<88, Status*(const KernelContext*, size_t*)>;
using OutputCount = Function<89, Status*(const KernelContext*, size_t*)>;
using Input = Function<90, Status*(const KernelContext*, size_t, const Value**)>;
using Output = Function<91, Status*(KernelContext*, size_t, const int64_t*, size_t, Value**)>;
using ReleaseStatus = Function<93, void(Status*)>;
using ReleaseValue = Function<96, void(Value*)>;
using ReleaseTensorInfo = Function<99, void(TensorInfo*)>;
using ReleaseAllocator = Function<132, void(Allocator*)>;
using ComputeStream = Function<193, Status*(const KernelContext*, void** stream)>;
using AttributeTensor = Function<236, Status*(const KernelInfo*, const char*, Allocator*, Value**)>;
// Sets the number to 1, and the value, if the input is an initializer of the graph.
using ConstantInput = Function<249, Status*(const KernelInfo*, size_t, int*, const Value**)>;
using ShapeInputCount = Function<267, Status*(const ShapeContext*, size_t*)>;
using InputTypeShape = Function<268, Status*(const ShapeContext*, size_t, TensorInfo**)>;
using ShapeAttribute = Function<269, Status*(const ShapeContext*, const char*, const OpAttribute**)>;
using SetOutputTypeShape = Function<270, Status*(const ShapeContext*, size_t, const TensorInfo*)>;
using SetSymbolicDimensions = Function<271, Status*(TensorInfo*, const char**, size_t)>;
using ReadAttribute =
    Function<272, Status*(const OpAttribute*, AttributeType, void*, size_t, size_t*)>;
using ParallelFor = Function<274, Status*(const KernelContext*, void (*)(void*, size_t), size_t,
                                          size_t, void*)>;
// Memory that is ordered with the context's stream; the caller frees it with its allocator.
using ScratchBuffer = Function<277, Status*(const KernelContext*, const MemoryInfo*, size_t, void**)>;
using KernelAllocator = Function<278, Status*(const KernelInfo*, MemoryType, Allocator**)>;
// The value owns the extents; null if there are none.
using TensorTypeAndShape = Function<414, Status*(const Value*, ElementType*, const int64_t**, size_t*)>;

struct ApiBase {
  const Api* (*GetApi)(uint32_t version);
  const char* (*GetVersionString)();
};

// The callbacks of a custom op.
struct CustomOp {
  uint32_t version;
  void* (*CreateKernel)(const CustomOp*, const Api*, const KernelInfo*);
  const char* (*GetName)(const CustomOp*);
  const char* (*GetExecutionProviderType)(const CustomOp*);
  ElementType (*GetInputType)(const CustomOp*, size_t index);
  size_t (*GetInputTypeCount)(const CustomOp*);
  ElementType (*GetOutputType)(const CustomOp*, size_t index);
  size_t (*GetOutputTypeCount)(const CustomOp*);
  void (*KernelCompute)(void* kernel, KernelContext*);
  void (*KernelDestroy)(void* kernel);
  Characteristic (*GetInputCharacteristic)(const CustomOp*, size_t index);
  Characteristic (*GetOutputCharacteristic)(const CustomOp*, size_t index);
  MemoryType (*GetInputMemoryType)(const CustomOp*, size_t index);
  int (*GetVariadicInputMinArity)(const CustomOp*);
  int (*GetVariadicInputHomogeneity)(const CustomOp*);
  int (*GetVariadicOutputMinArity)(const CustomOp*);
  int (*GetVariadicOutputHomogeneity)(const CustomOp*);
  Status* (*CreateKernelV2)(const CustomOp*, const Api*, const KernelInfo*, void** kernel);
  Status* (*KernelComputeV2)(void* kernel, KernelContext*);
  Status* (*InferOutputShape)(const CustomOp*, ShapeContext*);
  int (*GetStartVersion)(const CustomOp*);
  int (*GetEndVersion)(const CustomOp*);
  size_t (*GetMayInplace)(int** inputs, int** outputs);
  void (*ReleaseMayInplace)(int* inputs, int* outputs);
  size_t (*GetAliasMap)(int** inputs, int** outputs);
  void (*ReleaseAliasMap)(int* inputs, int* outputs);
};

}  // namespace ort
