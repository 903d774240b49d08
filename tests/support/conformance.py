"""The conformance matrix of the paged-cache ops, shared by every backend.

`cases()` are its combinations (cases.py). `build(case)` makes operands for one of them,
`expected(case)` runs the NumPy reference, `check(case, ...)` compares a backend's results with it.
Nothing here imports a backend.

What a kernel must not read is poisoned with NaN: tails of pages, spare pages, the null page, layers
that were never written, heads' elements beyond v_head_dim; page ids are shuffled. What it must not
write is compared byte by byte.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from kvgraph.contract.dims import ceildiv
from kvgraph.contract.dtypes import DTYPES
from kvgraph.ops import PAGED_ATTENTION, STORE_KV, UPDATE_AND_ATTEND, OpSpec
from kvgraph.ops._store_kv import quantize, token_slots
from tests.support.cases import LENGTHS, Case, cases

__all__ = ("LENGTHS", "Case", "cases")  # also names of this module

Array = npt.NDArray[Any]

LAYERS, SPARE_PAGES = 3, 2
EPSILON = 1e-5
"""Of norms of heads."""

# Relative to the largest output. Kernels and reference compute in float32, in different orders.
TOLERANCE = {"float32": 2e-5, "float16": 2e-3, "bfloat16": 1.6e-2}
# Of what a backend rounds queries and weights to.
ROUNDED = TOLERANCE | {"int16": 4e-4}

# A little more than the relative distance of neighbours.
STEP = {"float32": 1e-6, "float16": 1e-3, "bfloat16": 8e-3, "float8_e4m3fn": 0.13}


@dataclass
class Operands:
    """A case's inputs in the spec's order (None: left out), and its attributes."""

    spec: OpSpec
    inputs: dict[str, Array | None]
    attributes: dict[str, float]

    @property
    def arrays(self) -> list[Array | None]:
        return list(self.inputs.values())

    def copy(self) -> Operands:
        """The mutated inputs copied, the others shared."""
        inputs = {
            name: array.copy() if array is not None and name in self.spec.mutated else array
            for name, array in self.inputs.items()
        }
        return Operands(self.spec, inputs, self.attributes)


SPECS = {spec.name: spec for spec in (STORE_KV, PAGED_ATTENTION, UPDATE_AND_ATTEND)}


def build(case: Case) -> Operands:
    """Fresh operands; the same for every call with one case."""
    rng = np.random.default_rng(len(case.rows) * 1000 + case.head_dim)
    spec = SPECS[case.op]
    cached, new = (np.array([row[i] for row in case.rows], np.int32) for i in (0, 1))
    offsets = np.concatenate([[0], np.cumsum(new)]).astype(np.int32)
    table, slots = _pages(case, rng)
    q, k, v = _activations(case, int(offsets[-1]), rng)
    kv_blocks, kv_scales = _pool(case, slots, table, rng)
    longest = [[max(new, default=0), max(cached + new, default=0)]]
    values: dict[str, Array | None] = {
        "q": q,
        "kv_blocks": kv_blocks,
        "k": k,
        "v": v,
        "input_row_offsets": offsets,
        "cache_lengths": cached,
        "lookup_table": table,
        "max_lengths": np.array(longest, np.int32),
        "cos_sin": _cos_sin(case),
        "kv_scales": kv_scales,
        "sinks": rng.standard_normal(case.heads).astype(np.float32) if case.sinks else None,
        "q_norm": _norm(case, rng),
        "k_norm": _norm(case, rng) if case.stores else None,
    }
    inputs = {operand.name: values[operand.name] for operand in spec.inputs}
    return Operands(spec, inputs, attributes(case))


def attributes(case: Case) -> dict[str, float]:
    values: dict[str, float] = {
        "layer": case.layer,
        "scale": case.head_dim**-0.5,
        "window": case.window,
        "softcap": case.softcap,
        "causal": case.causal,
        "v_head_dim": case.v_head_dim,
        "chunked": case.chunked,
        "rope_style": case.rope_style or 0,
        "norm_epsilon": 0.0 if case.norm is None else EPSILON,
        "norm_offset": case.norm or 0.0,
    }
    return {a.name: values[a.name] for a in SPECS[case.op].attributes}


def _norm(case: Case, rng: np.random.Generator) -> Array | None:
    if case.norm is None:
        return None
    return rng.standard_normal(case.head_dim).astype(DTYPES[case.dtype].numpy)


def _pages(case: Case, rng: np.random.Generator) -> tuple[Array, int]:
    """Lookup table with shuffled ids, null page where a row owns none; and the pool's slots."""
    counts = [ceildiv(cached + new, case.page_size) for cached, new in case.rows]
    usable = sum(counts) + SPARE_PAGES
    ids = rng.permutation(usable)
    table = np.full((len(counts), max(counts, default=0) + 1), usable, np.int32)
    for row, count in enumerate(counts):
        table[row, :count], ids = ids[:count], ids[count:]
        cached, new = case.rows[row]
        if case.window and new:  # pages that slid out of the window
            table[row, : max(0, cached - case.window + 1) // case.page_size] = usable
        if new == 0:
            table[row] = usable
    return table, usable + 1


def _activations(case: Case, total: int, rng: np.random.Generator) -> tuple[Array | None, ...]:
    v_dim = case.v_head_dim or case.head_dim
    shapes = [(case.heads, case.head_dim), (case.kv_heads, case.head_dim), (case.kv_heads, v_dim)]
    q, k, v = (
        rng.standard_normal((total, *shape)).astype(DTYPES[case.dtype].numpy) for shape in shapes
    )
    return (q, k, v) if case.stores else (q, None, None)


def _pool(
    case: Case, slots: int, table: Array, rng: np.random.Generator
) -> tuple[Array, Array | None]:
    """NaN, except for the tokens that the rows have cached (all of them if the op stores none)."""
    v_dim = case.v_head_dim or case.head_dim
    shape = (slots, 2, LAYERS, case.page_size, case.kv_heads, case.head_dim)
    pool = np.zeros(shape, DTYPES[case.pool_dtype].numpy)
    scales = None
    if case.granularity:
        scales = np.full((*shape[:-1], case.head_dim // case.granularity), np.nan, np.float32)
    if case.pool_dtype == "int8":
        pool[...] = -128
    else:
        pool[...] = np.nan
    for row, (cached, new) in enumerate(case.rows):
        fills = case.op == "paged_attention" or not case.stores
        length = (cached + new if fills else cached) if new else 0
        offsets = np.array([0, length])
        pages, at = token_slots(offsets, np.zeros(1, int), table[row : row + 1], case.page_size)
        live = pages != slots - 1
        for kind, width in enumerate((case.head_dim, v_dim)):
            x = rng.standard_normal((length, case.kv_heads, width)).astype(np.float32)[live]
            if scales is not None and x.size:
                groups = width // case.granularity
                x, scale = quantize(x, case.pool_dtype, groups)
                scales[pages[live], kind, case.layer, at[live], :, :groups] = scale
            pool[pages[live], kind, case.layer, at[live], :, :width] = x.astype(pool.dtype)
    return pool, scales


def _cos_sin(case: Case) -> Array | None:
    if case.rope_style is None:
        return None
    positions = max((cached + new for cached, new in case.rows), default=1)
    rates = 10000.0 ** -(np.arange(case.rotary_dim // 2) / (case.rotary_dim // 2))
    angles = np.arange(positions)[:, None] * rates
    return np.concatenate([np.cos(angles), np.sin(angles)], -1).astype(np.float32)


@cache
def expected(case: Case) -> tuple[Array | None, Operands]:
    """The reference's result (None for store_kv) and the operands after it. Read only."""
    operands = build(case)
    with np.errstate(invalid="ignore"):
        out = operands.spec.reference(*operands.arrays, **operands.attributes)
    return (None if isinstance(out, tuple) else out), operands


def check(
    case: Case, out: Array | None, operands: Operands, *, computed_in: str | None = None
) -> None:
    """`out` and the mutated operands of a backend are what the reference makes of the case.

    `computed_in`: a dtype that the backend rounds queries and weights to. Stored bytes are equal,
    except that a key after its norm and rotation may round to the neighbouring value.
    """
    want, after = expected(case)
    if want is not None:
        assert out is not None
        assert (out.dtype, out.shape) == (want.dtype, want.shape)
        a, b = out.astype(np.float32), want.astype(np.float32)
        assert np.isfinite(b).all(), "the reference itself reads poison: a mistake in the case"
        assert np.isfinite(a).all(), "a value that must not be read reached the result"
        tolerance = max(TOLERANCE[case.dtype], ROUNDED.get(computed_in or "", 0.0))
        bound = tolerance * (1 + (np.abs(b).max() if b.size else 0))
        error = np.abs(a - b).max() if a.size else 0.0
        assert error <= bound, f"largest error {error:.3g}, tolerance {bound:.3g}"
    for name in operands.spec.mutated:
        _check_stored(case, name, operands.inputs[name], after.inputs[name])


def _check_stored(case: Case, name: str, got: Array | None, want: Array | None) -> None:
    if got is None or want is None:
        assert got is want
        return
    differ = np.flatnonzero(_bytes(got) != _bytes(want))
    is_rounded = case.rope_style is not None or case.norm is not None
    if not is_rounded or not differ.size:
        assert not differ.size, f"{name}: {differ.size} elements differ from the reference's"
        return
    a, b = (x.reshape(-1)[differ].astype(np.float32) for x in (got, want))
    step = max(STEP.get(str(got.dtype), 0.0), STEP[case.dtype])
    close = np.abs(a - b) <= step * (1 + np.abs(b)) + (got.dtype == np.int8)
    assert close.all(), f"{name}: {(~close).sum()} elements differ from the reference's"


def _bytes(x: Array) -> Array:
    return x.reshape(-1).view(np.dtype(f"u{x.itemsize}"))
