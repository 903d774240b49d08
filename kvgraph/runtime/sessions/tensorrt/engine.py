"""LoadedEngine: a TensorRT engine file, deserialised and checked against its manifest.

Checks run in the order in which failures are easiest to fix: the Python module, its version, the
driver, the GPU's architecture, the engine's bytes, the plugins, its inputs and outputs. TensorRT
reports its reasons only to a logger, so our errors contain its last message.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from kvgraph.contract.file_names import ENGINE_NAME
from kvgraph.contract.loading import require_package
from kvgraph.contract.manifest import EngineInfo
from kvgraph.contract.params import KVCacheStrategy
from kvgraph.errors import ArtifactError, KernelError, UnsupportedError
from kvgraph.ops.cuda_native import plugins_path
from kvgraph.runtime.folder import ArtifactFolder
from kvgraph.runtime.sessions.cuda_driver import CudaDevice
from kvgraph.runtime.sessions.cuda_errors import opening_error, step_error
from kvgraph.runtime.sessions.tensorrt.bindings import require_bindings
from kvgraph.signal_handlers import reraise_if_signalled

if TYPE_CHECKING:
    from tensorrt_rtx import IExecutionContext, ILogger

INSTALL = {
    "tensorrt_rtx": "pip install 'kvgraph[tensorrt]'",
    "tensorrt": "install NVIDIA TensorRT",
}
"""Modules that a manifest may name, each with the way to install it."""


class LoadedEngine:
    """An engine of `artifact` on `device`, with checked bindings.

    MissingDependencyError; ArtifactError (another version or architecture, both named; an engine
    that TensorRT rejects; bindings that differ from the manifest's); CapacityError; KernelError
    (plugins); UnsupportedError (a padded cache: plain operators do not write in place).
    """

    def __init__(self, artifact: ArtifactFolder, device: CudaDevice) -> None:
        self.info = info = _engine_info(artifact)
        self.path = path = artifact.folder / ENGINE_NAME
        self.trt = trt = _import(path, info)
        require_arch(path, info, device)
        self._logger = _logger(trt)
        # The runtime and its registry must outlive the engine.
        self._runtime = runtime = trt.Runtime(self._logger)
        if info.host_code:
            runtime.engine_host_code_allowed = True
        else:
            self._load_plugins()
        self.engine = runtime.deserialize_cuda_engine(_mapped(path))
        if self.engine is None:
            said = self.said()
            raise opening_error(path, said) or ArtifactError(
                f"{path}: expected an engine that {info.module} {info.version} takes on "
                f"{device.arch}, got one that it refuses: {said}"
            )
        self.hosted = require_bindings(self.engine, trt, artifact, info, path)

    def said(self) -> str:
        """The last error that TensorRT logged, except its wrapper around CUDA errors."""
        errors = [error for error in self._logger.errors if "catchCudaError" not in error]
        return errors[-1] if errors else "no reason was logged"

    def context(self, profile: int, stream: int, *, captured: bool) -> IExecutionContext:
        """An execution context in an optimisation profile; the caller gives it memory.

        TensorRT-RTX specialises kernels for the shapes that it sees: in the background, while
        other kernels run, or eagerly. A graph keeps its `captured` kernels, so there eagerly.
        """
        trt, engine = self.trt, self.engine
        config = engine.create_runtime_config()
        config.set_execution_context_allocation_strategy(
            trt.ExecutionContextAllocationStrategy.USER_MANAGED
        )
        if captured and hasattr(trt, "DynamicShapesKernelSpecializationStrategy"):
            config.dynamic_shapes_kernel_specialization_strategy = (
                trt.DynamicShapesKernelSpecializationStrategy.EAGER
            )
        context = engine.create_execution_context(config)
        if context is None or not context.set_optimization_profile_async(profile, stream):
            said = self.said()
            raise step_error(f"tensorrt: profile {profile}: {said}", said)
        return context

    def scratch_bytes(self) -> int:
        """Bytes of device memory that a context needs while it runs; the most of all profiles."""
        profiles = range(len(self.info.profiles))
        return max(int(self.engine.get_device_memory_size_for_profile_v2(i)) for i in profiles)

    def _load_plugins(self) -> None:
        library = plugins_path()
        registry = self._runtime.get_plugin_registry()
        if registry.load_library(str(library)) is None and not any(
            creator.plugin_namespace == "kvgraph" for creator in registry.all_creators_recursive
        ):
            raise KernelError(
                f"{library}: expected plugins that {self.info.module} {self.info.version} takes, "
                f"got a refusal: {self.said()}"
            )


def _mapped(path: Path) -> npt.NDArray[np.uint8]:
    """A file's bytes, memory-mapped."""
    try:
        return np.memmap(path, np.uint8, "r")
    except (OSError, ValueError) as error:  # missing, or empty
        reraise_if_signalled(error)
        raise ArtifactError(f"{path}: expected a file from the manifest, got {error}") from error


def _engine_info(artifact: ArtifactFolder) -> EngineInfo:
    info, where = artifact.manifest.engine, artifact.folder / "manifest.json"
    if info is None or not info.profiles:
        raise ArtifactError(
            f"{where}: engine: expected what built {ENGINE_NAME} and its profiles, got "
            f"{'none' if info is None else 'no profile'}"
        )
    if artifact.params().cache_strategy is KVCacheStrategy.PADDED:
        raise UnsupportedError(
            f"{where}: layout: expected a paged or continuous cache, whose plugins write in place, "
            "for backend 'tensorrt', got a padded one"
        )
    if not info.version:
        raise ArtifactError(
            f"{artifact.folder}: expected an engine of TensorRT, got an artifact for "
            f"{artifact.manifest.backend}, which builds it on this machine: kvgraph compile "
            f"--from-artifact {artifact.folder} -o OTHER"
        )
    if info.module not in INSTALL:
        raise ArtifactError(
            f"{where}: engine.module: expected one of {sorted(INSTALL)}, got {info.module!r}"
        )
    return info


def _import(path: Path, info: EngineInfo) -> Any:
    need = f"version {info.version} needed to run {path}"
    trt = require_package(info.module, need, INSTALL[info.module])
    if trt.__version__ != info.version:
        raise ArtifactError(
            f"{path}: expected an engine of {info.module} {trt.__version__} (installed here), "
            f"got one of {info.version}; build it again: kvgraph compile --from-artifact"
        )
    return trt


def require_arch(path: Path, info: EngineInfo, device: CudaDevice) -> None:
    """Raise ArtifactError unless the engine was built for the device's architecture, or any."""
    if info.archs and device.arch not in info.archs:
        raise ArtifactError(
            f"{path}: expected an engine for {device.arch} (cuda:{device.ordinal}, {device.name}), "
            f"got one for {', '.join(info.archs)}"
        )


def _logger(trt: Any) -> ILogger:
    class Errors(trt.ILogger):  # type: ignore[misc]  # the base is the module's own
        """Keeps TensorRT's errors; drops its other messages."""

        def __init__(self) -> None:
            trt.ILogger.__init__(self)
            self.errors: list[str] = []

        def log(self, severity: ILogger.Severity, message: str) -> None:
            if severity in (trt.ILogger.Severity.ERROR, trt.ILogger.Severity.INTERNAL_ERROR):
                self.errors.append(" ".join(message.split()))

    return Errors()
