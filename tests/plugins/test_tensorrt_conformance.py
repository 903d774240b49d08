"""plugins/tensorrt/conformance.cpp: our view of TensorRT's interfaces against headers.

No wheel ships the vendor's headers, so a stand-in with the documented names is compared here: it
shows that the comparison builds, holds, and fails where something differs. The vendor's own are
compared where CMake is given their folder, and TensorRT-RTX's builder calls the methods for real.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

PLUGINS = Path(__file__).parents[2] / "plugins"

STAND_IN = """
#pragma once
#include <cstddef>
#include <cstdint>
struct CUstream_st;
typedef CUstream_st* cudaStream_t;
namespace nvinfer1 {
enum class DataType : int32_t { kFLOAT, kHALF, kINT8, kINT32, kBOOL, kUINT8, kFP8, kBF16, kINT64 };
enum class TensorFormat : int32_t { kLINEAR };
enum class PluginFieldType : int32_t {
  kFLOAT16, kFLOAT32, kFLOAT64, kINT8, kINT16, kINT32, kCHAR, kDIMS, kUNKNOWN, kBF16, kINT64 };
enum class TensorRTPhase : int32_t { kBUILD, kRUNTIME };
enum class PluginCapabilityType : int32_t { kCORE, kBUILD, kRUNTIME };
enum class APILanguage : int32_t { kCPP, kPYTHON };
class Dims { public: static constexpr int32_t MAX_DIMS{8}; int32_t nbDims; int64_t d[MAX_DIMS]; };
struct PluginTensorDesc { Dims dims; DataType type; TensorFormat format; float scale; };
struct DynamicPluginTensorDesc { PluginTensorDesc desc; Dims min; Dims max; Dims opt; };
class PluginField { public:
  char const* name; void const* data; PluginFieldType type; int32_t length; };
struct PluginFieldCollection { int32_t nbFields; PluginField const* fields; };
class InterfaceInfo { public: char const* kind; int32_t major; int32_t minor; };
namespace apiv {
class VRoot { public: virtual ~VRoot() noexcept = default; };
class VDimensionExpr : public VRoot { public:
  virtual bool isConstant() const = 0; virtual int64_t getConstantValue() const = 0;
  virtual bool isSizeTensor() const = 0; };
class VExprBuilder : public VRoot { public: virtual void const* constant(int64_t) = 0; };
}
class INoCopy { protected: virtual ~INoCopy() = default; };
class IDimensionExpr : public INoCopy { protected: apiv::VDimensionExpr* mImpl; };
class IExprBuilder : public INoCopy { protected: apiv::VExprBuilder* mImpl; };
class DimsExprs { public: int32_t nbDims; IDimensionExpr const* d[Dims::MAX_DIMS]; };
class IVersionedInterface { public:
  virtual APILanguage getAPILanguage() const noexcept { return APILanguage::kCPP; }
  virtual InterfaceInfo getInterfaceInfo() const noexcept = 0;
  virtual ~IVersionedInterface() noexcept = default; };
class IPluginCapability : public IVersionedInterface {};
class IPluginV3 : public IVersionedInterface { public:
  virtual IPluginCapability* getCapabilityInterface(PluginCapabilityType) noexcept = 0;
  virtual IPluginV3* clone() noexcept = 0; };
class IPluginV3OneCore : public IPluginCapability { public:
  virtual char const* getPluginName() const noexcept = 0;
  virtual char const* getPluginVersion() const noexcept = 0;
  virtual char const* getPluginNamespace() const noexcept = 0; };
class IPluginV3OneBuild : public IPluginCapability { public:
  virtual int32_t configurePlugin() noexcept = 0;
  virtual int32_t getOutputDataTypes() const noexcept = 0;
  virtual int32_t getOutputShapes() noexcept = 0;
  virtual bool supportsFormatCombination() noexcept = 0;
  virtual int32_t getNbOutputs() const noexcept = 0;
  virtual size_t getWorkspaceSize() const noexcept { return 0; }
  virtual int32_t getValidTactics() noexcept { return 0; }
  virtual int32_t getNbTactics() noexcept { return 0; }
  virtual char const* getTimingCacheID() noexcept { return nullptr; }
  virtual int32_t getFormatCombinationLimit() noexcept { return 100; }
  virtual char const* getMetadataString() noexcept { return nullptr; } };
class IPluginV3OneBuildV2 : public IPluginV3OneBuild { public:
  virtual int32_t getAliasedInput(int32_t) noexcept { return -1; } };
class IPluginV3OneRuntime : public IPluginCapability { public:
  virtual int32_t setTactic(int32_t) noexcept { return 0; }
  virtual int32_t onShapeChange() noexcept = 0;
  virtual int32_t enqueue() noexcept = 0;
  virtual IPluginV3* attachToContext() noexcept = 0;
  virtual PluginFieldCollection const* getFieldsToSerialize() noexcept = 0; };
class IPluginCreatorV3One : public IVersionedInterface { public:
  virtual IPluginV3* createPlugin() noexcept = 0;
  virtual PluginFieldCollection const* getFieldNames() noexcept = 0;
  virtual char const* getPluginName() const noexcept = 0;
  virtual char const* getPluginVersion() const noexcept = 0;
  virtual char const* getPluginNamespace() const noexcept = 0; };
class ILogger { public: enum class Severity : int32_t { kINTERNAL_ERROR, kERROR, kWARNING };
  virtual void log(Severity, char const*) noexcept = 0; virtual ~ILogger() = default; };
class ILoggerFinder { public: virtual ILogger* findLogger() = 0;
  protected: virtual ~ILoggerFinder() = default; };
}
"""


def compare(folder: Path, headers: str) -> tuple[int, str]:
    """Exit code and errors of building and running the comparison; -1 where it does not build."""
    compiler = next((c for c in ("c++", "g++", "clang++") if shutil.which(c)), None)
    if compiler is None:
        pytest.skip("no C++ compiler")
    (folder / "NvInferRuntime.h").write_text(headers)
    program = folder / "conformance"
    command = [compiler, "-std=c++17", "-Wall", "-Wextra", f"-I{folder}", f"-I{PLUGINS}",
               str(PLUGINS / "tensorrt/conformance.cpp"), "-o", str(program)]  # fmt: skip
    made = subprocess.run(command, capture_output=True, text=True)
    if made.returncode:
        return -1, made.stderr
    done = subprocess.run([str(program)], capture_output=True, text=True)
    return done.returncode, made.stderr + done.stderr


def test_the_two_views_agree(tmp_path: Path) -> None:
    assert compare(tmp_path, STAND_IN) == (0, "")


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("kHALF, kINT8,", "kINT8, kHALF,", "static assertion failed: DataType::kHALF"),
        ("int32_t nbDims; int64_t d[", "int64_t nbDims; int64_t d[", "failed: Dims::count"),
        ("DataType type; TensorFormat format;", "TensorFormat format; DataType type;",
         "failed: TensorDesc::type"),
        ("kUNKNOWN, kBF16,", "kBF16, kUNKNOWN,", "failed: FieldType::kUnknown"),
    ],
)  # fmt: skip
def test_another_layout_does_not_build(tmp_path: Path, old: str, new: str, said: str) -> None:
    code, errors = compare(tmp_path, STAND_IN.replace(old, new))
    assert code == -1
    assert said in errors


def test_another_order_of_methods_is_named(tmp_path: Path) -> None:
    tactics = re.findall(r"  virtual .*Tactics\(\).*\n", STAND_IN)
    swapped = STAND_IN.replace("".join(tactics), "".join(reversed(tactics)))
    headers = "from the vendor's headers"
    assert compare(tmp_path, swapped) == (
        1,
        f"abi/tensorrt.h: PluginBuild::valid_tactics: expected slot 11 {headers}, got 10\n"
        f"abi/tensorrt.h: PluginBuild::num_tactics: expected slot 10 {headers}, got 11\n",
    )


def test_a_missing_method_does_not_build(tmp_path: Path) -> None:
    line = "  virtual int32_t getValidTactics() noexcept { return 0; }\n"
    code, errors = compare(tmp_path, STAND_IN.replace(line, ""))
    assert code == -1
    assert "getValidTactics" in errors
