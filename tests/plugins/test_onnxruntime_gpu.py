"""ONNX Runtime's CUDA ops on a GPU, in a host of our own: what a driver does with their launches.

Needs no ONNX Runtime; tests/runtime/test_onnxruntime_cuda_session.py has the test that does.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from fake_driver import build as build_driver
from plugins.test_onnxruntime_cuda_ops import build_host

torch = pytest.importorskip("torch", reason="holds the operands")
pytest.importorskip("triton", reason="kernels for CUDA are compiled by Triton")

SCRIPT = Path(__file__).with_name("onnxruntime_gpu.py")


def run(folder: Path, *arguments: str, **environment: str) -> str:
    given = {**os.environ, "HOST": str(build_host(folder)), **environment}
    given["PYTHONPATH"] = str(SCRIPT.parents[1])
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *arguments], env=given, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.cuda
def test_the_conformance_matrix(tmp_path: Path) -> None:
    if not torch.cuda.is_available():
        pytest.skip("no NVIDIA GPU")
    assert " 0 failed" in run(tmp_path)


def test_the_script_that_a_gpu_runs(tmp_path: Path) -> None:
    """Real cubins and operands, to a driver that runs nothing."""
    driver = str(build_driver(tmp_path / "driver"))
    case = "update_and_attend-bfloat16-bfloat16-4x2x64-p16-many"
    said = run(tmp_path, "--device", "cpu", case, LD_LIBRARY_PATH=driver, FAKE_SM="90")
    assert said == "1 cases passed on sm_90, 0 have no kernel, 0 failed\n"
