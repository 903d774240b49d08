"""ONNX Runtime's GPU provider: asked for, it is there or refused; never a silent fall to the CPU.

Of an artifact for a CPU here; test_onnxruntime_cuda_ops.py and tests/runtime have one for a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import kvgraph
from kvgraph.errors import DeviceError, MissingDependencyError
from kvgraph.ops.native import library_path
from kvgraph.runtime.sessions.onnxruntime import OnnxRuntimeSession, open_session

ort = pytest.importorskip("onnxruntime", reason="opens sessions")

CPU, CUDA = "CPUExecutionProvider", "CUDAExecutionProvider"


class FallsBack:
    """A build with a provider that cannot be loaded, as the GPU build is where there is no GPU."""

    def get_available_providers(self) -> list[str]:
        return [CUDA, CPU]

    def InferenceSession(self, model: str, options: Any, providers: list[str], **_: Any) -> Any:
        session = ort.InferenceSession(model, options, providers=[CPU])
        assert session.get_providers() == [CPU]
        return session


def options_with_ops() -> Any:
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.register_custom_ops_library(str(library_path("onnxruntime")))
    return options


def test_a_provider_that_cannot_be_loaded(compiled: Callable[..., Path]) -> None:
    model = compiled("tiny-llama") / "model.onnx"
    sentence = rf"expected {CUDA} on this machine, got \['{CPU}'\]: it could not be loaded"
    with pytest.raises(DeviceError, match=sentence):
        open_session(FallsBack(), model, options_with_ops(), CUDA)


def test_a_provider_that_the_build_lacks_or_cannot_load(compiled: Callable[..., Path]) -> None:
    """The installed build: without a GPU neither kind of it has the provider."""
    model = compiled("tiny-llama") / "model.onnx"
    if CUDA not in ort.get_available_providers():
        sentence = rf"expected {CUDA} from the installed build, got .*kvgraph\[onnx-gpu\]"
        with pytest.raises(MissingDependencyError, match=sentence):
            open_session(ort, model, options_with_ops(), CUDA)
    elif ort.InferenceSession(model, options_with_ops(), providers=[CUDA]).get_providers() == [CPU]:
        with pytest.raises(DeviceError, match="it could not be loaded"):
            open_session(ort, model, options_with_ops(), CUDA)
    else:
        pytest.skip("ONNX Runtime has a GPU here")


def test_the_session_runs_on_the_provider_it_says(compiled: Callable[..., Path]) -> None:
    session = OnnxRuntimeSession(kvgraph.load(compiled("tiny-llama")))
    assert session._session.get_providers() == [CPU]
