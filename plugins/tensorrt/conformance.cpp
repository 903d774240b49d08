// Compares plugins/abi/tensorrt.h with the vendor's headers: a program that CMake builds and runs
// where KVG_TENSORRT_INCLUDE names their folder (and that of the CUDA headers that they include).
// Layouts and numbers are compared by the compiler, the order of virtual methods when it runs.
#include <NvInferRuntime.h>

#include <cstddef>
#include <cstdio>
#include <cstring>

#include "abi/tensorrt.h"

namespace {

namespace vendor = nvinfer1;

#define KVG_SAME_SIZE(ours, theirs) static_assert(sizeof(trt::ours) == sizeof(vendor::theirs), #ours)
#define KVG_SAME_PLACE(ours, our_field, theirs, their_field)                                  \
  static_assert(offsetof(trt::ours, our_field) == offsetof(vendor::theirs, their_field) &&    \
                    sizeof(trt::ours::our_field) == sizeof(vendor::theirs::their_field),      \
                #ours "::" #our_field)
#define KVG_SAME_NUMBER(ours, theirs)                                                    \
  static_assert(static_cast<int32_t>(trt::ours) == static_cast<int32_t>(vendor::theirs), #ours)

static_assert(trt::kMaxDims == vendor::Dims::MAX_DIMS, "kMaxDims");
KVG_SAME_SIZE(Dims, Dims);
KVG_SAME_PLACE(Dims, count, Dims, nbDims);
KVG_SAME_PLACE(Dims, extent, Dims, d);
KVG_SAME_SIZE(TensorDesc, PluginTensorDesc);
KVG_SAME_PLACE(TensorDesc, dims, PluginTensorDesc, dims);
KVG_SAME_PLACE(TensorDesc, type, PluginTensorDesc, type);
KVG_SAME_PLACE(TensorDesc, format, PluginTensorDesc, format);
KVG_SAME_PLACE(TensorDesc, scale, PluginTensorDesc, scale);
KVG_SAME_SIZE(DynamicTensorDesc, DynamicPluginTensorDesc);
KVG_SAME_PLACE(DynamicTensorDesc, desc, DynamicPluginTensorDesc, desc);
KVG_SAME_PLACE(DynamicTensorDesc, min, DynamicPluginTensorDesc, min);
KVG_SAME_PLACE(DynamicTensorDesc, max, DynamicPluginTensorDesc, max);
KVG_SAME_PLACE(DynamicTensorDesc, opt, DynamicPluginTensorDesc, opt);
KVG_SAME_SIZE(Field, PluginField);
KVG_SAME_PLACE(Field, name, PluginField, name);
KVG_SAME_PLACE(Field, data, PluginField, data);
KVG_SAME_PLACE(Field, type, PluginField, type);
KVG_SAME_PLACE(Field, length, PluginField, length);
KVG_SAME_SIZE(Fields, PluginFieldCollection);
KVG_SAME_PLACE(Fields, count, PluginFieldCollection, nbFields);
KVG_SAME_PLACE(Fields, fields, PluginFieldCollection, fields);
KVG_SAME_SIZE(InterfaceInfo, InterfaceInfo);
KVG_SAME_PLACE(InterfaceInfo, kind, InterfaceInfo, kind);
KVG_SAME_PLACE(InterfaceInfo, major, InterfaceInfo, major);
KVG_SAME_PLACE(InterfaceInfo, minor, InterfaceInfo, minor);
KVG_SAME_SIZE(DimsExprs, DimsExprs);
KVG_SAME_PLACE(DimsExprs, count, DimsExprs, nbDims);
KVG_SAME_PLACE(DimsExprs, extent, DimsExprs, d);
KVG_SAME_SIZE(Dimension, IDimensionExpr);
KVG_SAME_SIZE(ExprBuilder, IExprBuilder);

KVG_SAME_NUMBER(DataType::kFLOAT, DataType::kFLOAT);
KVG_SAME_NUMBER(DataType::kHALF, DataType::kHALF);
KVG_SAME_NUMBER(DataType::kINT8, DataType::kINT8);
KVG_SAME_NUMBER(DataType::kINT32, DataType::kINT32);
KVG_SAME_NUMBER(DataType::kFP8, DataType::kFP8);
KVG_SAME_NUMBER(DataType::kBF16, DataType::kBF16);
KVG_SAME_NUMBER(DataType::kINT64, DataType::kINT64);
KVG_SAME_NUMBER(Format::kLinear, TensorFormat::kLINEAR);
KVG_SAME_NUMBER(FieldType::kFloat32, PluginFieldType::kFLOAT32);
KVG_SAME_NUMBER(FieldType::kFloat64, PluginFieldType::kFLOAT64);
KVG_SAME_NUMBER(FieldType::kInt8, PluginFieldType::kINT8);
KVG_SAME_NUMBER(FieldType::kInt32, PluginFieldType::kINT32);
KVG_SAME_NUMBER(FieldType::kChar, PluginFieldType::kCHAR);
KVG_SAME_NUMBER(FieldType::kUnknown, PluginFieldType::kUNKNOWN);
KVG_SAME_NUMBER(FieldType::kInt64, PluginFieldType::kINT64);
KVG_SAME_NUMBER(Phase::kBuild, TensorRTPhase::kBUILD);
KVG_SAME_NUMBER(Phase::kRuntime, TensorRTPhase::kRUNTIME);
KVG_SAME_NUMBER(Capability::kCore, PluginCapabilityType::kCORE);
KVG_SAME_NUMBER(Capability::kBuild, PluginCapabilityType::kBUILD);
KVG_SAME_NUMBER(Capability::kRuntime, PluginCapabilityType::kRUNTIME);
KVG_SAME_NUMBER(Language::kCpp, APILanguage::kCPP);
KVG_SAME_NUMBER(Severity::kError, ILogger::Severity::kERROR);
KVG_SAME_NUMBER(Severity::kWarning, ILogger::Severity::kWARNING);

// Index of a virtual method in its class's virtual table. By the Itanium C++ ABI (section 2.3), the
// first word of a pointer to the method is its offset there plus 1.
template <class Method>
int slot(Method method) {
  ptrdiff_t word = 0;
  static_assert(sizeof method >= sizeof word, "a pointer to a member function");
  std::memcpy(&word, &method, sizeof word);
  return static_cast<int>((word - 1) / static_cast<ptrdiff_t>(sizeof(void*)));
}

int g_different = 0;

template <class Ours, class Theirs>
void same(const char* name, Ours ours, Theirs theirs) {
  if (slot(ours) == slot(theirs)) return;
  std::fprintf(stderr, "abi/tensorrt.h: %s: expected slot %d from the vendor's headers, got %d\n",
               name, slot(theirs), slot(ours));
  ++g_different;
}

#define KVG_SAME_SLOT(ours, theirs) same(#ours, &trt::ours, &vendor::theirs)

}  // namespace

int main() {
  KVG_SAME_SLOT(Versioned::language, IVersionedInterface::getAPILanguage);
  KVG_SAME_SLOT(Versioned::info, IVersionedInterface::getInterfaceInfo);
  KVG_SAME_SLOT(Plugin::capability, IPluginV3::getCapabilityInterface);
  KVG_SAME_SLOT(Plugin::clone, IPluginV3::clone);
  KVG_SAME_SLOT(PluginCore::name, IPluginV3OneCore::getPluginName);
  KVG_SAME_SLOT(PluginCore::version, IPluginV3OneCore::getPluginVersion);
  KVG_SAME_SLOT(PluginCore::name_space, IPluginV3OneCore::getPluginNamespace);
  KVG_SAME_SLOT(PluginBuild::configure, IPluginV3OneBuildV2::configurePlugin);
  KVG_SAME_SLOT(PluginBuild::output_types, IPluginV3OneBuildV2::getOutputDataTypes);
  KVG_SAME_SLOT(PluginBuild::output_shapes, IPluginV3OneBuildV2::getOutputShapes);
  KVG_SAME_SLOT(PluginBuild::supports_format, IPluginV3OneBuildV2::supportsFormatCombination);
  KVG_SAME_SLOT(PluginBuild::num_outputs, IPluginV3OneBuildV2::getNbOutputs);
  KVG_SAME_SLOT(PluginBuild::workspace_size, IPluginV3OneBuildV2::getWorkspaceSize);
  KVG_SAME_SLOT(PluginBuild::valid_tactics, IPluginV3OneBuildV2::getValidTactics);
  KVG_SAME_SLOT(PluginBuild::num_tactics, IPluginV3OneBuildV2::getNbTactics);
  KVG_SAME_SLOT(PluginBuild::timing_cache_id, IPluginV3OneBuildV2::getTimingCacheID);
  KVG_SAME_SLOT(PluginBuild::format_combination_limit, IPluginV3OneBuildV2::getFormatCombinationLimit);
  KVG_SAME_SLOT(PluginBuild::metadata, IPluginV3OneBuildV2::getMetadataString);
  KVG_SAME_SLOT(PluginBuild::aliased_input, IPluginV3OneBuildV2::getAliasedInput);
  KVG_SAME_SLOT(PluginRuntime::set_tactic, IPluginV3OneRuntime::setTactic);
  KVG_SAME_SLOT(PluginRuntime::on_shape_change, IPluginV3OneRuntime::onShapeChange);
  KVG_SAME_SLOT(PluginRuntime::enqueue, IPluginV3OneRuntime::enqueue);
  KVG_SAME_SLOT(PluginRuntime::attach, IPluginV3OneRuntime::attachToContext);
  KVG_SAME_SLOT(PluginRuntime::fields_to_serialize, IPluginV3OneRuntime::getFieldsToSerialize);
  KVG_SAME_SLOT(Creator::create, IPluginCreatorV3One::createPlugin);
  KVG_SAME_SLOT(Creator::field_names, IPluginCreatorV3One::getFieldNames);
  KVG_SAME_SLOT(Creator::name, IPluginCreatorV3One::getPluginName);
  KVG_SAME_SLOT(Creator::version, IPluginCreatorV3One::getPluginVersion);
  KVG_SAME_SLOT(Creator::name_space, IPluginCreatorV3One::getPluginNamespace);
  KVG_SAME_SLOT(DimensionImpl::is_constant, apiv::VDimensionExpr::isConstant);
  KVG_SAME_SLOT(DimensionImpl::value, apiv::VDimensionExpr::getConstantValue);
  KVG_SAME_SLOT(DimensionImpl::is_size_tensor, apiv::VDimensionExpr::isSizeTensor);
  KVG_SAME_SLOT(BuilderImpl::constant, apiv::VExprBuilder::constant);
  KVG_SAME_SLOT(Logger::log, ILogger::log);
  KVG_SAME_SLOT(LoggerFinder::find, ILoggerFinder::findLogger);
  return g_different != 0;
}
