"""The conformance matrix on the Triton kernels, in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

triton = pytest.importorskip("triton", reason="compiles the kernels: pip install 'kvgraph[cuda]'")
torch = pytest.importorskip("torch", reason="holds the kernels' operands")

ROOT = Path(__file__).parents[2]


def matrix(*arguments: str, interpret: bool) -> None:
    environment = dict(os.environ)
    environment.pop("TRITON_INTERPRET", None)
    if interpret:
        environment["TRITON_INTERPRET"] = "1"
    command = [sys.executable, "-m", "tests.support.matrix", *arguments]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " cases passed" in done.stdout


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(".")[:2])


@pytest.mark.skipif(
    _version(triton.__version__) < (3, 9) and _version(np.__version__) >= (2, 4),
    reason="the interpreter of this Triton fails on NumPy 2.4 and later",
)
@pytest.mark.parametrize("arch", ["sm_90", "sm_80"])
def test_interpreted(arch: str) -> None:
    """sm_80 has smaller tiles, and decodes float8 in software."""
    chosen = ["--slim"] if arch == "sm_90" else ["--slim", "float8", "long-context"]
    matrix("--arch", arch, *chosen, interpret=True)


def test_kernels_for_a_gpu_that_is_elsewhere(tmp_path: Path) -> None:
    case = "store_kv-bfloat16-int8-8x1x64-p16-decode"
    command = [sys.executable, "-m", "tests.support.matrix", "--compile", str(tmp_path), case]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("1 kernels for sm_90\n", "")
    assert {path.suffix for path in (tmp_path / "kernels" / "sm_90").iterdir()} == {
        ".cubin",
        ".gz",
        ".json",
    }


@pytest.mark.cuda
def test_on_a_gpu() -> None:
    if not torch.cuda.is_available():
        pytest.skip("no NVIDIA GPU")
    major, minor = torch.cuda.get_device_capability()
    matrix("--arch", f"sm_{major}{minor}", "--device", "cuda", interpret=False)
