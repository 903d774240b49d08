"""The plugins' planning in C++ against kvgraph.kernels.launch: the same launches, everywhere."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvgraph.kernels import launch
from kvgraph.kernels.launch import Sizes
from kvgraph.kernels.shapes import MULTIPROCESSORS, AttentionShape
from kvgraph.ops.native import library_path
from tests.plugins.tensorrt_fields import shape_of, text_of

ARCHS = ("sm_75", "sm_80", "sm_86", "sm_89", "sm_120")
VALUES = (
    "batch_size",
    "layer",
    "table_width",
    "tiles_per_row",
    "rows_below",
    "new_above",
    "new_upto",
    "num_parts",
    "tokens_per_row",
)
SHAPES = {
    "gqa": shape_of(),
    "mha": shape_of(4, 4, 128, dtype="float16", pool_dtype="float16"),
    "mqa": shape_of(71, 1, 64, dtype="float16", pool_dtype="float16"),
    "window": shape_of(window=100, dtype="float32", pool_dtype="float32"),
    "wide window": shape_of(window=5000, dtype="float16", pool_dtype="float16"),
    "int8 sinks": shape_of(
        dtype="float16", pool_dtype="int8", granularity=64, head_dim=64, sinks=True
    ),
}
EDGES = st.sampled_from([0, 1, 2, 3, 4, 5, 15, 16, 17, 31, 64, 255, 256, 257, 1000, 4096])
Planned = list[tuple[str, tuple[int, int], dict[str, int]]]


def native(
    shape: AttentionShape, arch: str, sizes: Sizes, layer: int, stores: bool = True
) -> tuple[Planned, tuple[int, int], tuple[int, int]]:
    """Launches, scratch elements, and the bound of those."""
    dll = ctypes.CDLL(str(library_path("tensorrt")))
    text, message = ctypes.create_string_buffer(4096), ctypes.create_string_buffer(512)
    numbers = (sizes.batch_size, sizes.total_seq_len, sizes.max_new, sizes.max_context,
               sizes.table_width, layer, int(stores), 1)  # fmt: skip
    status = dll.kvg_tensorrt_plan(
        b"update_and_attend", text_of(shape, [arch]).encode(), arch.encode(),
        (ctypes.c_int64 * 8)(*numbers), text, ctypes.c_size_t(4096), message, ctypes.c_size_t(512),
    )  # fmt: skip
    assert status == 0, message.value
    launches: Planned = []
    ends: dict[str, tuple[int, int]] = {}
    for role, *words in (line.split() for line in text.value.decode().splitlines()):
        values = list(map(int, words))
        if role in ("scratch", "bound"):
            ends[role] = (values[0], values[1])
        else:
            named = dict(zip(VALUES, values[2:], strict=True))
            launches.append((role, (values[0], values[1]), named))
    return launches, ends["scratch"], ends["bound"]


def expected(
    shape: AttentionShape, arch: str, sizes: Sizes, layer: int, stores: bool = True
) -> tuple[Planned, tuple[int, int]]:
    plan = launch.plan_update_and_attend(shape, arch, sizes, layer, stores=stores)
    roles = {"store_kv": "store", "merge_parts": "merge"}
    launches = []
    for step in plan.launches:
        named = zip(step.variant.parameters, step.arguments, strict=True)
        values = {p.name: v for p, v in named if isinstance(v, int)}
        role = step.variant.role or roles[step.variant.kernel.name]
        launches.append((role, step.grid, values))
    return launches, (plan.scratch.get("partial_out", 0), plan.scratch.get("partial_state", 0))


def compare(shape: AttentionShape, arch: str, sizes: Sizes, layer: int, stores: bool) -> None:
    found, scratch, bound = native(shape, arch, sizes, layer, stores)
    wanted, elements = expected(shape, arch, sizes, layer, stores)
    assert [(role, grid) for role, grid, _ in found] == [(role, grid) for role, grid, _ in wanted]
    for (_, _, given_values), (_, _, values) in zip(found, wanted, strict=True):
        assert {name: given_values[name] for name in values} == values
    assert scratch == elements
    assert all(used <= most for used, most in zip(scratch, bound, strict=True))


@pytest.mark.parametrize("name", SHAPES)
@settings(max_examples=150, deadline=None)
@given(
    arch=st.sampled_from(ARCHS), batch=EDGES.filter(bool), total=EDGES, new=EDGES, pages=EDGES,
    layer=st.integers(0, 40), stores=st.booleans(),
)  # fmt: skip
def test_it_plans_as_the_kernels_do(
    name: str, arch: str, batch: int, total: int, new: int, pages: int, layer: int, stores: bool
) -> None:
    if arch == "sm_75" and SHAPES[name].cache.dtype == "bfloat16":
        arch = "sm_80"
    sizes = Sizes(batch, total, max(new, 1), max(16 * pages, 1), max(pages, 1))
    compare(SHAPES[name], arch, sizes, layer, stores)


@pytest.mark.parametrize("arch", MULTIPROCESSORS)
def test_every_architecture(arch: str) -> None:
    shape = shape_of(dtype="float16", pool_dtype="float16")
    for sizes in (Sizes(1, 1, 1, 100_000, 6250), Sizes(64, 64, 1, 8192, 512),
                  Sizes(3, 5000, 4096, 8192, 512), Sizes(2, 1024, 512, 512, 32)):  # fmt: skip
        compare(shape, arch, sizes, 3, True)


@settings(max_examples=60, deadline=None)
@given(batch=st.integers(1, 300), total=st.integers(1, 4000), pages=st.integers(1, 3000),
       fewer=st.tuples(st.integers(1, 300), st.integers(1, 4000), st.integers(1, 3000)),
)  # fmt: skip
def test_the_workspace_of_a_profile_holds_every_smaller_step(
    batch: int, total: int, pages: int, fewer: tuple[int, int, int]
) -> None:
    shape = shape_of(dtype="float16", pool_dtype="float16")
    b, t, p = (min(pair) for pair in zip((batch, total, pages), fewer, strict=True))
    _, _, bound = native(shape, "sm_89", Sizes(batch, total, total, 16 * pages, pages), 0)
    _, scratch, _ = native(shape, "sm_89", Sizes(b, t, t, 16 * p, p), 0)
    assert all(used <= most for used, most in zip(scratch, bound, strict=True))


def refusal(text: str, arch: str = "sm_86") -> str:
    dll: Any = ctypes.CDLL(str(library_path("tensorrt")))
    message = ctypes.create_string_buffer(512)
    out = ctypes.create_string_buffer(64)
    status = dll.kvg_tensorrt_plan(
        b"update_and_attend", text.encode(), arch.encode(), (ctypes.c_int64 * 8)(*[1] * 8), out,
        ctypes.c_size_t(64), message, ctypes.c_size_t(512),
    )  # fmt: skip
    assert status != 0
    return message.value.decode()


GOOD = text_of(shape_of(), ["sm_86", "sm_89"])


@pytest.mark.parametrize(
    ("old", "new", "sentence"),
    [
        ("kvgraph-kernels 1", "kvgraph-kernels 2",
         'expected "kvgraph-kernels 1" from this kvgraph, got "kvgraph-kernels 2"'),
        ("type T bfloat16", "type T double",
         'expected type T or P and a dtype, got "type T double"'),
        ("type T bfloat16\n", "", "expected types T and P, got one of them"),
        ("dim num_kv_heads 2\n", "", "expected dim num_kv_heads, got none"),
        ("dim num_heads 8", "dim num_heads", 'expected a name and a number, got "dim num_heads"'),
        ("arch sm_86", "arch hopper", None),
        ("kernel merge", "kernel fold", "expected a kernel of an arch: role, function, warps, "
         "shared bytes, SHA-256, got "),
        (" table_width", " width", 'expected values that a plan has, got "kernel '),
        ("k*16", "k*0", "expected an alignment of at least 1 of every pointer, got "),
        ("attribute", "constant", "expected type, dim, attribute, arch or kernel, got "),
    ],
)  # fmt: skip
def test_a_damaged_field_is_refused(old: str, new: str, sentence: str | None) -> None:
    said = refusal(GOOD.replace(old, new))
    if sentence is None:
        assert said == 'arch: expected a name such as sm_90 or sm_90a, got "hopper"'
    else:
        assert said.startswith(f"field kernels: {sentence}")


def test_a_kernel_that_the_op_needs_is_missing() -> None:
    lines = [line for line in GOOD.splitlines() if not line.startswith("kernel merge")]
    assert refusal("\n".join(lines)) == (
        "field kernels: sm_86: expected a merge kernel for update_and_attend, got none"
    )


def test_another_architecture_is_named() -> None:
    assert refusal(GOOD, "sm_90") == (
        "device: expected one that runs the graph's kernels (sm_86, sm_89), got compute "
        "capability 9.0"
    )
    assert refusal(GOOD, "sm_80").endswith("got compute capability 8.0")
