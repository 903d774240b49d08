"""What every form of kvgraph.linear must hold, over the operands and attributes of a call."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from torch._subclasses.fake_tensor import FakeTensorMode

from kvgraph.errors import KernelError
from kvgraph.ops import LINEAR, native, torch_ops
from kvgraph.ops.torch_arrays import tensor_over
from tests.support.isa import forced_isa

Array = npt.NDArray[Any]


def require_equal_rows(
    isa: str,
    given: Sequence[Array | None],
    attributes: Mapping[str, float],
    heights: Iterable[int],
) -> None:
    """A row of x, and of the residual behind all, has the same bits at every height and thread
    count."""
    x, *rest, residual = given
    assert x is not None
    with forced_isa(isa) as library:
        library.dll.kvg_cpu_set_num_threads(1)
        expected = native.run(LINEAR, *given, **attributes)
        library.dll.kvg_cpu_set_num_threads(2)
        np.testing.assert_array_equal(native.run(LINEAR, *given, **attributes), expected)
        for take in heights:
            some = [x[:take], *rest, None if residual is None else residual[:take]]
            np.testing.assert_array_equal(native.run(LINEAR, *some, **attributes), expected[:take])


def refusals(given: Sequence[Array | None], attributes: Mapping[str, float]) -> list[str]:
    """What the kernel says of a call, and what the op does of its fake tensors."""
    with pytest.raises(KernelError) as of_kernel:
        native.run(LINEAR, *given, **attributes)
    mode = FakeTensorMode()
    fakes = [None if a is None else mode.from_tensor(tensor_over(a, a.dtype.name)) for a in given]
    with pytest.raises(KernelError) as of_op:
        torch_ops.linear(*fakes, **attributes)
    return [str(of_kernel.value), str(of_op.value)]
