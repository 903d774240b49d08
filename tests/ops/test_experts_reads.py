"""kvgraph.experts over weights in a mapped file: a call reads the experts of its rows alone."""

from __future__ import annotations

import mmap
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from kvgraph.contract.dims import Array
from kvgraph.ops import EXPERTS, native
from tests.support.page_cache import forget, in_memory

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="other systems are not asked")

COUNT, WIDTH, INNER = 24, 1024, 512
UP = (COUNT, 2 * INNER // 16, WIDTH // 2, 32)  # experts, panels, lines, bfloat16
DOWN = (COUNT, WIDTH // 16, INNER // 2, 32)
FIRST, THEN = 0, 12


def test_a_call_reads_no_expert_that_it_does_not_use(tmp_path: Path) -> None:
    """Its neighbours in the file would take the place of others, if memory is short. That weights
    are missing is noticed some calls after the first that waits for them."""
    path = tmp_path / "weights"
    whole = np.prod(UP) + np.prod(DOWN)
    bits = np.random.default_rng(0).integers(0x3C00, 0x3D00, whole, np.uint16)
    bits.tofile(path)
    expected = called(bits, THEN)
    del bits
    forget(path)
    weights = np.memmap(path, np.uint16, "c")
    for _ in range(10):
        called(weights, FIRST)
    np.testing.assert_array_equal(called(weights, THEN), expected)
    up = in_memory(path)[: np.prod(UP) * 2 // mmap.PAGESIZE].reshape(COUNT, -1)
    assert up[THEN].all()
    assert not up[[THEN - 2, THEN - 1, THEN + 1, THEN + 2]].any()


def called(weights: Array, expert: int) -> Array:
    packed = weights.view(ml_dtypes.bfloat16)
    up, down = packed[: np.prod(UP)].reshape(UP), packed[np.prod(UP) :].reshape(DOWN)
    x = np.ones((1, WIDTH), np.float32)
    given = [x, np.array([[expert]], np.int32), np.ones((1, 1), np.float32), up, down]
    found: Array = native.run(EXPERTS, *given, inner_features=INNER, up_bits=16, down_bits=16)
    return found
