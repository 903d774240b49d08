"""The conformance matrix on a GPU, in hosts of our own: what a driver does with their launches.

Needs neither ONNX Runtime nor TensorRT; the tests of their sessions in tests/runtime do.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.plugins.hosts import build

torch = pytest.importorskip("torch", reason="holds the operands")
pytest.importorskip("triton", reason="kernels for CUDA are compiled by Triton")

RUNTIMES = ("onnxruntime", "tensorrt")


@pytest.mark.cuda
@pytest.mark.parametrize("runtime", RUNTIMES)
def test_the_conformance_matrix(tmp_path: Path, runtime: str) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no NVIDIA GPU")
    host = build(runtime, tmp_path)
    assert " 0 failed" in host.run("-m", f"tests.plugins.{runtime}_gpu", driver=False)


@pytest.mark.parametrize(("runtime", "sm"), [("onnxruntime", 90), ("tensorrt", 89)])
def test_the_script_that_a_gpu_runs(tmp_path: Path, runtime: str, sm: int) -> None:
    """Real cubins and operands, to a driver that runs nothing."""
    case = "update_and_attend-bfloat16-bfloat16-4x2x64-p16-many"
    host = build(runtime, tmp_path)
    script = ["-m", f"tests.plugins.{runtime}_gpu"]
    said = host.run(*script, "--device", "cpu", case, driver=True, sm=sm)
    assert said == f"1 cases passed on sm_{sm}, 0 have no kernel, 0 failed\n"
