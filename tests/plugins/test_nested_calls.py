"""A host's `parallel_for` runs other calls on the thread that waits in it.

Pools that steal work do so, such as those of oneTBB and rayon.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

from kvgraph.ops import EXPERTS, LINEAR, native
from tests.ops.test_experts import call_of
from tests.ops.test_linear import operands
from tests.support.host_threads import host_threads
from tests.support.packed import pack


def linear_of(rows: int) -> Callable[[], Any]:
    random = np.random.default_rng(rows)
    packed = pack([random.standard_normal((288, 600)).astype(np.float32)], 8)
    x = random.standard_normal((rows, 600)).astype(np.float32)
    return partial(native.run, LINEAR, x, *operands(packed), None, out_features=288, bits=8)


def experts_of(shape: str) -> Callable[[], Any]:
    given, attributes, _ = call_of(shape, 8, seed=1)
    return partial(native.run, EXPERTS, *given, **attributes)


OUTER = {"linear": linear_of(64), "experts": experts_of("gpt_oss")}
NESTED = {
    "linear of fewer rows": linear_of(40),
    "linear of more rows": linear_of(500),
    "fewer experts": experts_of("ragged edges"),
    "more experts": experts_of("more experts than rows"),
}


@pytest.mark.parametrize("nested", NESTED)
@pytest.mark.parametrize("outer", OUTER)
def test_a_call_inside_another_leaves_its_memory(outer: str, nested: str) -> None:
    first, second = OUTER[outer], NESTED[nested]
    expected = first(), second()
    inside: list[Any] = []
    is_inside = False

    def loop(run: Callable[[int], None], count: int) -> None:
        nonlocal is_inside
        for index in range(count):
            if not is_inside and index == count // 2:
                is_inside = True
                inside.append(second())
                is_inside = False
            run(index)

    with host_threads(loop):
        found = first()
    assert len(inside) > 1
    np.testing.assert_array_equal(found, expected[0])
    for each in inside:
        np.testing.assert_array_equal(each, expected[1])
