"""The conformance matrix of the paged-cache ops, shared by every backend.

`cases()` is a deterministic selection of about 150 combinations; `build(case)` makes operands for
one of them, `expected(case)` runs the NumPy reference, `check(case, ...)` compares a backend's
results with it. Nothing here imports a backend.

What a kernel must not read is poisoned with NaN: tails of pages, spare pages, the null page, layers
that were never written, heads' elements beyond v_head_dim; page ids are shuffled. What it must not
write is compared byte by byte.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from itertools import product
from typing import Any

import numpy as np
import numpy.typing as npt

from kvgraph.contract.dims import ceildiv
from kvgraph.contract.dtypes import DTYPES
from kvgraph.ops import PAGED_ATTENTION, STORE_KV, UPDATE_AND_ATTEND, OpSpec
from kvgraph.ops._store_kv import quantize, token_slots

Array = npt.NDArray[Any]

QUANTIZED = ("int8", "float8_e4m3fn")
LAYERS, SPARE_PAGES = 3, 2

# Relative to the largest output. Kernels and reference compute in float32, in different orders.
TOLERANCE = {"float32": 2e-5, "float16": 2e-3, "bfloat16": 1.6e-2}
# Of what a backend rounds queries and weights to.
ROUNDED = TOLERANCE | {"int16": 4e-4}

# A little more than the relative distance of neighbours.
STEP = {"float32": 1e-6, "float16": 1e-3, "bfloat16": 8e-3, "float8_e4m3fn": 0.13}


@dataclass(frozen=True)
class Case:
    """One combination. `rows` are (cached, new) token counts."""

    op: str
    dtype: str = "float32"
    pool_dtype: str = "float32"
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    page_size: int = 16
    rows: tuple[tuple[int, int], ...] = ((5, 1),)
    window: int = 0
    softcap: float = 0.0
    sinks: bool = False
    causal: int = 1
    v_head_dim: int = 0
    rope_style: int | None = None
    rotary_dim: int = 0
    granularity: int = 0
    stores: bool = True
    layer: int = 1
    chunked: int = 0
    label: str = field(default="", compare=False)

    @property
    def id(self) -> str:
        options = [
            f"{'c' if self.chunked else 'w'}{self.window}" * bool(self.window),
            "softcap" * bool(self.softcap),
            "sinks" * self.sinks,
            "full" * (not self.causal),
            f"dv{self.v_head_dim}" * bool(self.v_head_dim),
            f"rope{self.rope_style}" * (self.rope_style is not None),
            "nostore" * (not self.stores),
            self.label,
        ]
        shape = f"{self.heads}x{self.kv_heads}x{self.head_dim}-p{self.page_size}"
        parts = [self.op, self.dtype, self.pool_dtype, shape, *options]
        return "-".join(part for part in parts if part)


LENGTHS = {
    "decode": lambda S: ((0, 1), (S - 1, 1), (S, 1), (S + 1, 1), (3 * S + 2, 1)),
    "prefill": lambda S: ((0, 1), (0, max(S - 1, 1)), (0, S), (0, S + 1), (0, 2 * S + 3)),
    "chunk": lambda S: ((1, S), (S - 1, 2), (S, S + 1), (S + 1, 5), (2 * S, 3)),
    "mixed": lambda S: ((0, S + 1), (7, 0), (2 * S, 1), (0, 0), (S - 1, 3), (3, 1)),
}
"""Rows (cached, new) by kind, from the page size: every edge of a page."""

AXES: dict[str, tuple[Any, ...]] = {
    "op": ("store_kv", "paged_attention", "update_and_attend", "update_and_attend"),
    "dtype": ("float32", "float16", "bfloat16"),
    "pool_dtype": ("float32", "float16", "bfloat16", "int8", "float8_e4m3fn"),
    "heads": ((4, 4), (4, 2), (8, 1), (6, 2)),
    "head_dim": (16, 64, 80, 96, 128, 256),
    "page_size": (1, 3, 16, 128),
    "kind": ("decode", "prefill", "chunk", "mixed"),
    "window": (0, 0, 1, 5, 17),
    "softcap": (0.0, 0.0, 5.0),
    "sinks": (False, False, True),
    "causal": (1, 1, 1, 0),
    "narrow_v": (False, False, True),
    "rope_style": (None, 0, 1),
    "stores": (True, True, True, False),
}
PAIRED = ("op", "dtype", "pool_dtype", "heads", "head_dim", "page_size", "kind")
"""Axes of which every pair of values occurs; the others vary along."""


@cache
def cases() -> tuple[Case, ...]:
    """Pairs of the main axes, chosen greedily from seeded random rows, then single cases."""
    return (*_pairwise(), *_singles())


def _pairwise() -> Iterator[Case]:
    random_ = random.Random(20)
    missing = {
        pair
        for a, b in product(PAIRED, PAIRED)
        if a < b
        for pair in product([(a, v) for v in AXES[a]], [(b, v) for v in AXES[b]])
    }
    made = 0
    while missing or made < 110:
        candidates = [
            {axis: random_.choice(values) for axis, values in AXES.items()} for _ in range(40)
        ]
        best = max(candidates, key=lambda c: len(_pairs(c) & missing))
        missing -= _pairs(best)
        made += 1
        yield _case(best)


def _pairs(choice: dict[str, Any]) -> set[Any]:
    return {((a, choice[a]), (b, choice[b])) for a, b in product(PAIRED, PAIRED) if a < b}


def _case(choice: dict[str, Any]) -> Case:
    op, D = choice["op"], choice["head_dim"]
    quantized = choice["pool_dtype"] in QUANTIZED
    granularity = {80: 8, 96: 16}.get(D, D // 2) if quantized else 0
    attends, fused = op != "store_kv", op == "update_and_attend"
    heads, kv_heads = choice["heads"]
    return Case(
        op=op,
        dtype=choice["dtype"],
        pool_dtype=choice["pool_dtype"],
        heads=heads,
        kv_heads=kv_heads,
        head_dim=D,
        page_size=choice["page_size"],
        rows=LENGTHS[choice["kind"]](choice["page_size"]),
        window=choice["window"] if attends else 0,
        softcap=choice["softcap"] if attends else 0.0,
        sinks=choice["sinks"] and attends,
        causal=choice["causal"] if attends else 1,
        v_head_dim=D // 2 if choice["narrow_v"] else 0,
        rope_style=choice["rope_style"] if fused else None,
        rotary_dim=D if D % 32 else D // 2,
        granularity=granularity,
        stores=choice["stores"] or not fused,
        label=choice["kind"],
    )


def _singles() -> Iterator[Case]:
    for op in ("store_kv", "paged_attention", "update_and_attend"):
        yield Case(op, rows=((0, 0), (4, 0)), label="no-new-tokens")
        yield Case(op, rows=(), label="no-rows")
        yield Case(op, heads=2, kv_heads=2, rows=((0, 1),), label="one-token")
    for dtype in TOLERANCE:
        yield Case("update_and_attend", dtype, dtype, rows=((300, 1), (0, 300)), label="many")
        yield Case("paged_attention", dtype, dtype, rows=((4200, 1), (9, 1)), label="long-context")
    for pool in ("bfloat16", "float8_e4m3fn", "int8"):  # one scale for a head
        many = {"granularity": 64 * (pool in QUANTIZED), "label": "many"}
        yield Case("update_and_attend", "float32", pool, rows=((300, 1), (5, 300)), **many)
    odd = {"head_dim": 21, "v_head_dim": 7, "rows": ((20, 9), (40, 1), (0, 70)), "window": 30}
    yield Case("update_and_attend", "float32", "bfloat16", label="odd-many", **odd)
    long = {"rows": ((5000, 3), (2047, 1), (0, 0), (1, 1)), "sinks": True, "label": "long-context"}
    yield Case("update_and_attend", page_size=128, window=3000, **long)
    yield Case("update_and_attend", page_size=128, window=3000, chunked=1, **long)
    yield Case("update_and_attend", page_size=3, softcap=20.0, **long)
    yield Case("update_and_attend", page_size=16, causal=0, v_head_dim=32, **long)
    yield Case(
        "update_and_attend",
        heads=32,
        kv_heads=8,
        head_dim=128,
        page_size=128,
        rows=((200, 1), (0, 70), (130, 9)),
        rope_style=0,
        rotary_dim=128,
        label="llama-8b",
    )
    yield Case(
        "update_and_attend", heads=71, kv_heads=1, rows=((20, 2), (0, 9)), label="multiquery"
    )
    for kind, dtype, pool in (("mixed", "float32", "float32"), ("prefill", "bfloat16", "int8")):
        chunks = {"window": 20, "chunked": 1, "granularity": 32 * (pool in QUANTIZED)}
        rows = LENGTHS[kind](16)
        yield Case("paged_attention", dtype, pool, rows=rows, label=kind, **chunks)
        yield Case("update_and_attend", dtype, pool, rows=rows, label=kind, **chunks)
    for page, dtype, pool in ((48, "bfloat16", "bfloat16"), (96, "float16", "int8")):
        rows = ((page - 1, 1), (2 * page, page + 5), (0, 3 * page), (700, 1))
        odd = {"page_size": page, "granularity": 64 * (pool in QUANTIZED), "rows": rows}
        yield Case("update_and_attend", dtype, pool, label="odd-pages", **odd)
    for dtype, pool in (("float32", "float32"), ("bfloat16", "bfloat16"), ("bfloat16", "int8")):
        wide = {"head_dim": 512, "granularity": 128 * (pool in QUANTIZED), "rope_style": 0}
        wide |= {"heads": 8, "kv_heads": 1, "rotary_dim": 512, "rows": ((70, 1), (30, 40))}
        yield Case("update_and_attend", dtype, pool, label="wide-heads", **wide)
    yield Case("update_and_attend", rows=((70, 1), (19, 60)), window=1, chunked=1, label="mixed")
    yield Case(
        "update_and_attend", head_dim=20, v_head_dim=7, rows=((20, 2), (0, 9)), label="odd-widths"
    )


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
    }
    attributes: dict[str, float] = {
        "layer": case.layer,
        "scale": case.head_dim**-0.5,
        "window": case.window,
        "softcap": case.softcap,
        "causal": case.causal,
        "v_head_dim": case.v_head_dim,
        "chunked": case.chunked,
        "rope_style": case.rope_style or 0,
    }
    return Operands(
        spec,
        {operand.name: values[operand.name] for operand in spec.inputs},
        {a.name: attributes[a.name] for a in spec.attributes},
    )


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
    except that a rotated key may round to the neighbouring value.
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
    if case.rope_style is None or not differ.size:
        assert not differ.size, f"{name}: {differ.size} elements differ from the reference's"
        return
    a, b = (x.reshape(-1)[differ].astype(np.float32) for x in (got, want))
    step = max(STEP.get(str(got.dtype), 0.0), STEP[case.dtype])
    close = np.abs(a - b) <= step * (1 + np.abs(b)) + (got.dtype == np.int8)
    assert close.all(), f"{name}: {(~close).sum()} elements differ from the reference's"


def _bytes(x: Array) -> Array:
    return x.reshape(-1).view(np.dtype(f"u{x.itemsize}"))
