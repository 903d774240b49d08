"""Plans of many steps against stored ones (`--update-golden` writes them): roles, grids, values."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from kvgraph.kernels import launch
from kvgraph.kernels.launch import Sizes
from kvgraph.kernels.shapes import AttentionShape, PoolShape

GOLDEN = Path(__file__).parents[1] / "golden" / "launch-plans.txt"


def shape_of(heads: int, kv_heads: int, dtype: str, window: int = 0) -> AttentionShape:
    return AttentionShape(PoolShape(dtype, dtype, kv_heads, 64, 16, 4), heads, 0.125, window)


SHAPES = {
    "gqa": shape_of(8, 2, "float16"),
    "mha": shape_of(4, 4, "float16"),
    "mqa": shape_of(71, 1, "float16"),
    "window": shape_of(8, 2, "float32", 100),
    "wide": shape_of(8, 2, "float16", 5000),
}
ROWS = ((1, 1, 1, 1), (1, 1, 1, 2000), (1, 1, 1, 100_000), (2, 2, 1, 257), (64, 64, 1, 8192),
        (200, 200, 1, 40_000), (4, 9, 3, 600), (4, 16, 16, 16), (1, 300, 300, 300),
        (3, 700, 600, 900), (3, 700, 700, 70_000), (2, 1024, 512, 512), (64, 4160, 4096, 8192),
        (300, 4096, 1000, 1000), (5, 31, 17, 4096), (1, 0, 0, 0))  # fmt: skip
"""batch_size, total_seq_len, max_new, max_context."""


def lines() -> Iterator[str]:
    for arch in ("sm_80", "sm_121"):
        for index, (name, shape) in enumerate(SHAPES.items()):
            for batch, total, new, context in ROWS:
                sizes = Sizes(batch, total, new, context, -(-context // 16))
                stores = (index + batch) % 3 > 0
                plan = launch.plan_update_and_attend(shape, arch, sizes, index, stores=stores)
                yield f"{name} {arch} {batch} {total} {new} {context} stores {int(stores)}"
                yield from map(described, plan.launches)
                yield from (f"  {name} {elements}" for name, elements in plan.scratch.items())


def described(step: launch.Launch) -> str:
    named = zip(step.variant.parameters, step.arguments, strict=True)
    values = [f"{p.name}={value}" for p, value in named if isinstance(value, int)]
    role = step.variant.role or step.variant.kernel.name
    return f"  {role} {step.grid[0]}x{step.grid[1]} {' '.join(values)}"


def test_plans_are_the_stored_ones(request: pytest.FixtureRequest) -> None:
    found = "\n".join(lines()) + "\n"
    if request.config.getoption("--update-golden"):
        GOLDEN.write_text(found)
    assert found == GOLDEN.read_text()
