"""Calls of the kernel library: one that is interrupted leaves nothing for the next."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from kvgraph.contract import devices
from kvgraph.errors import DeviceError, KernelError
from kvgraph.ops import STORE_KV, native
from kvgraph.ops.native import INSTALL
from tests.runtime.test_faults import Fault, lines_of, traced


def operands(tokens: int) -> list[Any]:
    """An empty pool of two pages, and new tokens of its one row."""
    x_TKD = np.arange(1, tokens * 16 + 1, dtype=np.float32).reshape(tokens, 2, 8)
    pool = np.zeros((2, 2, 1, 4, 2, 8), np.float32)
    offsets, lengths = np.array([0, tokens], np.int32), np.zeros(1, np.int32)
    return [pool, x_TKD, -x_TKD, offsets, lengths, np.array([[0]], np.int32)]


def stored(tokens: int, *, by: Any = native.run) -> Any:
    arrays = operands(tokens)
    by(STORE_KV, *arrays, layer=0)
    return arrays[0]


@pytest.mark.parametrize("next_tokens", [1, 3])
def test_a_call_that_is_interrupted(next_tokens: int) -> None:
    """Calls of one token and of three take turns; the one after the fault has its own shapes."""
    wanted = operands(next_tokens)
    STORE_KV.reference(*wanted, layer=0)
    stored(1)
    lines = lines_of(lambda: stored(3))
    assert len(lines) > 20
    for line in lines:
        stored(1)
        with traced(Fault(line, 1, KeyboardInterrupt), line[0]), pytest.raises(KeyboardInterrupt):
            stored(3)
        np.testing.assert_array_equal(stored(next_tokens), wanted[0])


def test_no_library_of_kernels_is_loaded_by_a_processor_that_cannot_run_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(devices, "first_processor", lambda: {"flags": "fpu sse4_2 avx"})
    for name in ("cpu", "onnxruntime"):
        with pytest.raises(DeviceError, match=rf"libkvgraph_{name}: .* got one without avx2, bmi2"):
            native.library_path(name)
    assert native.library_path("cuda").exists()


@pytest.mark.parametrize(
    ("why", "step"),
    [("failed to map segment from shared object", "ulimit -v"), ("invalid ELF header", INSTALL)],
)
def test_a_library_that_cannot_be_opened(
    monkeypatch: pytest.MonkeyPatch, why: str, step: str
) -> None:
    monkeypatch.setattr(ctypes, "CDLL", mock.Mock(side_effect=OSError(f"a.so: {why}")))
    with pytest.raises(KernelError, match=rf"^a\.so: .* cannot be opened \({why}\); .*{step}"):
        native.opened(Path("a.so"))
