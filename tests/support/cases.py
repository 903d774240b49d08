"""The cases of the conformance matrix: about 150 combinations, the same in every run."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from itertools import product
from typing import Any

from kvgraph.contract.dtypes import ACTIVATIONS, QUANTIZED


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
    norm: float | None = None  # offset of the weights of q's and k's heads; None: no norms
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
            f"norm{self.norm:g}" if self.norm is not None else "",
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
    for dtype in ACTIVATIONS:
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
    yield from _normalised()


def _normalised() -> Iterator[Case]:
    """Norms of heads alone, and before each rope; without a store of k; and heads of odd widths."""
    mixed = {"rows": LENGTHS["mixed"](16), "label": "mixed"}
    halves, pairs = ({"rope_style": style, "rotary_dim": 64} for style in (0, 1))
    fused = "update_and_attend"
    yield Case(fused, norm=0.0, **halves, **mixed)
    yield Case(fused, "bfloat16", "bfloat16", norm=1.0, **pairs, **mixed)
    yield Case(fused, "bfloat16", "int8", norm=0.0, granularity=64, **halves, **mixed)
    yield Case(fused, "float16", "float8_e4m3fn", norm=0.0, granularity=32, **pairs, **mixed)
    yield Case(fused, norm=1.0, **mixed)
    yield Case(fused, norm=0.0, stores=False, **halves, **mixed)
    yield Case(fused, head_dim=80, norm=0.0, rope_style=0, rotary_dim=40, **mixed)
    yield Case(fused, head_dim=21, norm=1.0, rope_style=1, rotary_dim=14, **mixed)
    long = {"rows": ((5000, 3), (2047, 1), (0, 0), (1, 1)), "label": "long-context"}
    yield Case(fused, "bfloat16", "bfloat16", norm=0.0, sinks=True, **halves, **long)
