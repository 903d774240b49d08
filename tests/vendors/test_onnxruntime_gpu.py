"""The wheel of onnxruntime-gpu on a machine without a GPU: it takes our library and our graphs."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable
from pathlib import Path

import pytest

try:
    importlib.metadata.version("onnxruntime-gpu")
except importlib.metadata.PackageNotFoundError:
    pytest.skip("onnxruntime-gpu: make test-vendors installs it", allow_module_level=True)

import onnxruntime

from kvgraph import Engine, SamplingParams, load
from kvgraph.contract.manifest import read_manifest
from kvgraph.errors import DeviceError
from kvgraph.runtime.folder import ArtifactFolder
from kvgraph.runtime.sessions.onnxruntime import register_ops
from kvgraph.runtime.sessions.onnxruntime_cuda import OnnxRuntimeCudaSession

Compiled = Callable[..., Path]
GREEDY = SamplingParams(max_new_tokens=16, ignore_eos=True)


def test_it_is_the_build_for_gpus() -> None:
    assert onnxruntime.__version__ == importlib.metadata.version("onnxruntime-gpu")
    assert "CUDAExecutionProvider" in onnxruntime.get_available_providers()


def test_tokens_on_its_cpu_provider(compiled: Compiled) -> None:
    """Against the reference session, which runs no ONNX Runtime."""
    found, expected = (
        Engine(load(compiled("tiny-llama")), session=session).generate(["The import"], GREEDY)
        for session in ("onnxruntime", "reference")
    )
    assert found[0].token_ids == expected[0].token_ids


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_it_opens_graphs_for_cuda(compiled: Compiled, dtype: str) -> None:
    """With our operators' types and shapes, on its CPU provider; the CUDA one needs a driver."""
    folder = compiled("tiny-llama", "onnx", target="cuda:sm_90", dtype=dtype)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    register_ops(options)
    session = onnxruntime.InferenceSession(
        folder / "model.onnx", options, providers=["CPUExecutionProvider"]
    )
    manifest = read_manifest(folder)
    assert [value.name for value in session.get_inputs()] == [
        symbol.name for symbol in manifest.signature.inputs
    ]


def test_without_a_driver_the_session_says_so(compiled: Compiled) -> None:
    folder = compiled("tiny-llama", "onnx", target="cuda:sm_90", dtype="float32")
    with pytest.raises(DeviceError, match="expected an NVIDIA driver on this machine, got none"):
        OnnxRuntimeCudaSession(ArtifactFolder(folder, read_manifest(folder)))
