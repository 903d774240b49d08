"""The wheels of torch-tensorrt: what they convert of our programs on a machine without a GPU.

`make test-vendors` installs them without their dependencies, their native libraries (for a CUDA
build of torch) taken out.
"""

from __future__ import annotations

import importlib.metadata
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

try:
    importlib.metadata.version("torch-tensorrt-rtx")
except importlib.metadata.PackageNotFoundError:
    pytest.skip("torch-tensorrt-rtx: make test-vendors installs it", allow_module_level=True)

from kvgraph.compiler.passes.thread_pool import FUNCTIONAL
from kvgraph.contract.manifest import Manifest, read_manifest
from kvgraph.errors import UnsupportedError
from kvgraph.rebuild import rebuild
from kvgraph.rebuild.torch_engine import TorchRequest, TorchResult, build
from tests.vendors.cpu_torch import stand_in

Compiled = Callable[..., Path]


@pytest.fixture(scope="module")
def vendor() -> Iterator[Any]:
    """torch_tensorrt, which is TensorRT-RTX's under that name."""
    with pytest.MonkeyPatch.context() as patch:
        stand_in(patch)
        logging.disable(logging.WARNING)
        import torch_tensorrt

        yield torch_tensorrt
        logging.disable(logging.NOTSET)


@pytest.fixture(scope="module", params=["tiny-llama", "gemma2"])
def artifact(compiled: Compiled, request: pytest.FixtureRequest) -> Path:
    return compiled(request.param, "torch-tensorrt", target="cuda:sm_89", dtype="bfloat16")


def built(artifact: Path, engine: Path) -> TorchResult:
    manifest = read_manifest(artifact)
    assert manifest.engine is not None
    (profile,) = manifest.engine.profiles
    shapes = manifest.signature.to_tensorrt_profile(profile.min, profile.opt, profile.max)
    return build(TorchRequest(str(artifact), str(artifact / "kernels"), str(engine), shapes))


def test_a_tensorrt_without_plugins_is_refused_by_name(
    vendor: Any, artifact: Path, tmp_path: Path
) -> None:
    with pytest.raises(UnsupportedError, match=r"has add_plugin_v3, got tensorrt_rtx 1\.\S+, "):
        built(artifact, tmp_path / "engine")
    assert not (tmp_path / "engine").exists()


def test_the_package_that_is_for_tensorrt_rtx_is_found(
    artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its distribution has another name than its module."""
    monkeypatch.setattr("kvgraph.rebuild.artifact._archs", lambda *_: ("sm_89",))
    stages: list[str] = []
    with pytest.raises(UnsupportedError, match="torch-tensorrt"):
        rebuild(artifact, tmp_path / "out", progress=stages.append)
    assert stages[-1] == "building the engine with torch_tensorrt 2.13.0"
    assert list(tmp_path.iterdir()) == []


def test_whole_programs_are_converted(
    vendor: Any, artifact: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An identity stands where TensorRT-RTX takes no plugin; the rest is its network, which it
    builds. What it cannot do without a driver is read the engine again."""
    import tensorrt as trt
    from torch_tensorrt.dynamo.conversion import _TRTInterpreter as interpreter
    from torch_tensorrt.dynamo.conversion._ConverterRegistry import DYNAMO_ATEN_CONVERTERS

    added: list[tuple[list[str], Any]] = []

    def add_plugin_v3(network: Any, inputs: list[Any], shapes: list[Any], plugin: Any) -> Any:
        added.append(([tensor.name for tensor in inputs], plugin))
        return network.add_identity(inputs[0])

    class Runtime:
        def __init__(self, logger: Any) -> None:
            pass

        def deserialize_cuda_engine(self, data: Any) -> Any:
            return type("Engine", (), {"serialize": lambda self: bytes(data)})()

    class WithoutDriver:
        def __getattr__(self, name: str) -> Any:
            return Runtime if name == "Runtime" else getattr(trt, name)

    monkeypatch.setattr(trt.INetworkDefinition, "add_plugin_v3", add_plugin_v3, raising=False)
    monkeypatch.setattr(interpreter, "trt", WithoutDriver())
    DYNAMO_ATEN_CONVERTERS.pop(FUNCTIONAL, None)  # of another artifact
    result = built(artifact, tmp_path / "engine")
    manifest: Manifest = read_manifest(artifact)
    assert (tmp_path / "engine").stat().st_size > 10_000
    assert result.module == "tensorrt_rtx"
    assert len(added) == manifest.ops["kvgraph.update_and_attend"]
    assert {type(plugin).__name__ for _, plugin in added} == {"IPluginV3"}
    pools = {result.names[symbol.name] for symbol in manifest.signature.buffers}
    assert {names[1] for names, _ in added} == pools, "every layer writes the graph's pool"


def test_the_wheel_for_enterprise_tensorrt_says_what_it_lacks() -> None:
    """It is in a folder of its own, as both wheels are the package torch_tensorrt."""
    folder = Path(sys.prefix, "torch-tensorrt")
    assert (folder / "torch_tensorrt").is_dir()
    done = subprocess.run(
        [sys.executable, "-c", "from kvgraph.compiler.targets.tensorrt import torch_tensorrt as a\n"
         "try: a.register(['sm_89'])\n"
         "except Exception as error: print(type(error).__name__, error)"],
        env={**os.environ, "PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
    )  # fmt: skip
    assert (
        done.stdout.strip()
        .splitlines()[-1]
        .startswith("MissingDependencyError torch_tensorrt: needed for the torch-tensorrt adapter")
    ), done.stdout + done.stderr
