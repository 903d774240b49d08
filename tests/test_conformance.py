"""Every CPU backend of the paged-cache ops against the NumPy reference, over one matrix."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvgraph.contract.dtypes import DTYPES
from kvgraph.ops.native import library as native_library
from tests.support import conformance
from tests.support.conformance import Case, Operands
from tests.support.isa import forced_isa, isa_of

Array = np.ndarray[Any, Any]
Backend = Callable[[Operands], "Array | None"]


def native(operands: Operands) -> Array | None:
    from kvgraph.ops.native import run

    out = run(operands.spec, *operands.arrays, **operands.attributes)
    return None if isinstance(out, tuple) else out


def avx2(operands: Operands) -> Array | None:
    with forced_isa("avx2"):
        return native(operands)


def avx512(operands: Operands) -> Array | None:
    with forced_isa("avx512"):
        return native(operands)


def avx512_bf16(operands: Operands) -> Array | None:
    with forced_isa("avx512_bf16"):
        return native(operands)


def onnxruntime(operands: Operands) -> Array | None:
    pytest.importorskip("onnx", reason="builds the one-node model")
    pytest.importorskip("onnxruntime", reason="runs it")
    from tests.support.onnx_node import run

    return run(operands)


def torch(operands: Operands) -> Array | None:
    torch = pytest.importorskip("torch", reason="the torch form of the ops")
    from kvgraph.ops import torch_ops

    tensors = [None if a is None else as_tensor(torch, a) for a in operands.arrays]
    out = getattr(torch_ops, operands.spec.name)(*tensors, **operands.attributes)
    if out is None:
        return None
    raw = {2: torch.int16, 4: torch.int32}[out.element_size()]
    dtype = DTYPES[str(out.dtype).removeprefix("torch.")].numpy
    return out.view(raw).numpy().view(dtype)


def as_tensor(torch: Any, array: Array) -> Any:
    """Shares memory; through integers, as torch takes no ml_dtypes."""
    name = str(array.dtype)
    if name not in {"bfloat16", "float8_e4m3fn"}:
        return torch.from_numpy(array)
    raw = array.view({1: np.uint8, 2: np.int16}[array.itemsize])
    return torch.from_numpy(raw).view(getattr(torch, name))


BACKENDS = [native, avx2, avx512, avx512_bf16, onnxruntime, torch]


@pytest.mark.parametrize("backend", BACKENDS, ids=lambda b: b.__name__)
@pytest.mark.parametrize("case", conformance.cases(), ids=lambda c: c.id)
def test_equals_the_reference(case: Case, backend: Backend) -> None:
    operands = conformance.build(case)
    out = backend(operands)
    conformance.check(case, out, operands, computed_in=computed_in(case, backend))


def computed_in(case: Case, backend: Backend) -> str | None:
    """Words of 16 bits over pools that hold no more, where the processor has their products."""
    isa = backend.__name__ if backend in (avx2, avx512) else isa_of(native_library())
    if case.pool_dtype in ("float32", "float16") or isa not in ("avx512_bf16", "amx"):
        return None
    has_one_scale = case.granularity == case.head_dim
    return "int16" if case.pool_dtype == "int8" and has_one_scale else "bfloat16"


@pytest.mark.parametrize("head_dim", [40, 64, 80, 128, 256, 512])
@pytest.mark.parametrize("heads", [2, 6, 8, 16])
def test_int8_loses_less_than_bfloat16(head_dim: int, heads: int) -> None:
    """Of 1 to 8 query heads a kv head: 16-bit queries and weights, if any are rounded."""
    case = Case(
        "paged_attention",
        pool_dtype="int8",
        heads=heads,
        head_dim=head_dim,
        rows=((0, 1), (70, 1), (1100, 1)),
        granularity=head_dim,
    )
    operands = conformance.build(case)
    conformance.check(case, native(operands), operands, computed_in="int16")
    operands.inputs["q"][1, 0, 3] = np.nan
    out = native(operands)
    assert out is not None
    assert np.isnan(out[1, 0]).all()
    assert np.isnan(out).sum() == head_dim


def test_the_matrix_covers_every_pair_of_its_main_axes() -> None:
    cases = conformance.cases()
    assert 130 <= len(cases) <= 200
    assert {c.page_size for c in cases} >= {1, 3, 16, 128}
    for pool in ("float32", "float16", "bfloat16", "int8", "float8_e4m3fn"):
        for dtype in conformance.TOLERANCE:
            assert any(c.dtype == dtype and c.pool_dtype == pool for c in cases)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_pages_beyond_2_to_the_31_elements(dtype: str) -> None:
    """A sparse pool: untouched pages are never backed by memory."""
    S, K, D = 128, 8, 128
    page = 2 * S * K * D
    slots = 2**31 // page + 40
    pool = np.zeros((slots, 2, 1, S, K, D), DTYPES[dtype].numpy)
    table = np.array([[slots - 2, 3], [slots - 7, slots - 3]], np.int32)
    assert int(table[1, 0]) * page > 2**31
    rng = np.random.default_rng(0)
    q, k, v = (
        rng.standard_normal((200, heads, D)).astype(DTYPES[dtype].numpy) for heads in (K, K, K)
    )
    index = [np.array(a, np.int32) for a in ([0, 140, 200], [0, 77], table, [[140, 140]])]
    small = np.zeros((4, *pool.shape[1:]), pool.dtype)
    near = [*index[:2], np.array([[2, 3], [0, 1]], np.int32), index[3]]
    spec = conformance.UPDATE_AND_ATTEND
    want = spec.reference(q, small, *near, k, v, layer=0, scale=0.1)
    operands = Operands(
        spec,
        dict(zip([i.name for i in spec.inputs], [q, pool, *index, k, v], strict=False))
        | dict.fromkeys(("cos_sin", "kv_scales", "sinks")),
        {"layer": 0, "scale": 0.1},
    )
    got = native(operands)
    assert got is not None
    tolerance = conformance.TOLERANCE[dtype] * 4
    np.testing.assert_allclose(got.astype("f4"), want.astype("f4"), atol=tolerance)
    for far, close in zip(table.flat, (2, 3, 0, 1), strict=True):
        assert pool[far].tobytes() == small[close].tobytes()
