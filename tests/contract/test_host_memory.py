"""Host memory is zeroed and aligned, or refused in one sentence."""

from __future__ import annotations

import pytest

from kvgraph.contract.host_memory import ALIGNMENT, host_zeros
from kvgraph.errors import CapacityError


@pytest.mark.parametrize("shape", [(0,), (1,), (3, 0, 2), (5, 7)])
@pytest.mark.parametrize("dtype", ["int8", "float32"])
def test_aligned_zeros(shape: tuple[int, ...], dtype: str) -> None:
    found = host_zeros("pool", shape, dtype)
    assert (found.shape, found.dtype.name) == (shape, dtype)
    assert not found.size or found.ctypes.data % ALIGNMENT == 0
    assert found.flags.c_contiguous
    assert found.flags.writeable
    assert not found.any()


@pytest.mark.parametrize("count", [1 << 50, 1 << 62, 1 << 80])
def test_more_than_there_is(count: int) -> None:
    text = (
        r"^pool: expected .*iB of host memory for \[2, \d+\], which the system refused; use fewer"
    )
    with pytest.raises(CapacityError, match=text):
        host_zeros("pool", (2, count), "float32")
