"""Small steps for compiled kernels, with the expected results of the ops' NumPy references.

Memory that a kernel must not read is NaN: tails of pages, spare pages, the null page, other layers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from kvgraph.contract.dims import Array, ceildiv
from kvgraph.contract.dtypes import DTYPES
from kvgraph.kernels import launch
from kvgraph.kernels.launch import LaunchPlan, Sizes
from kvgraph.kernels.route_plan import RouteShape, plan_route
from kvgraph.kernels.shapes import AttentionShape
from kvgraph.kernels.variants import Variant
from kvgraph.ops import RMS_NORM, ROUTE, SILU_MUL, UPDATE_AND_ATTEND
from kvgraph.ops._store_kv import quantize, token_slots

TOLERANCE = {"float32": 2e-5, "float16": 2e-3, "bfloat16": 1.6e-2, "int32": 0.0}
"""Largest error of a kernel, relative to 1 + the largest value, by the dtype it computes in."""

STORED = {"float32": 2e-6, "float16": 2e-3, "bfloat16": 1.6e-2, "float8_e4m3fn": 0.13, "int8": 1.0}
"""Largest error of stored values: about the distance of neighbouring numbers, since a rotated key
may round to a neighbour."""

SPARE_PAGES = 2
BEHIND = 300
"""Cached tokens before a chunk or a token: they give blocks of keys that every query sees."""

LONG_CONTEXT = 700
"""Cached tokens of a long context, which give more than one part."""

Rows = tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Trial:
    """One small step. `given`: arrays by parameter name, which a run changes. `wanted`: expected
    values of the parameters that it writes."""

    name: str
    plan: LaunchPlan
    given: dict[str, Array]
    wanted: dict[str, Array]

    def error(self) -> tuple[str, float, float]:
        """(parameter, error, limit) of the result with the largest error relative to its limit."""
        errors = [self._error_of(name) for name in self.wanted]
        return max(errors, key=lambda each: each[1] / max(each[2], 1e-300))

    def _error_of(self, name: str) -> tuple[str, float, float]:
        found, is_stored = self.given[name], name in ("kv_blocks", "kv_scales")
        limit = (STORED if is_stored else TOLERANCE)[str(found.dtype)]
        return name, _error(found, self.wanted[name], is_stored), limit


def _error(found: Array, want: Array, is_stored: bool) -> float:
    """Largest error relative to 1 + the largest value; relative to 1 + each value if stored, and
    absolute for int8. It is infinite if only one of both is a number."""
    kind = np.dtype(f"u{found.itemsize}")
    differ = found.view(kind) != want.view(kind)
    differ &= ~(np.isnan(found) & np.isnan(want))
    if not differ.any():
        return 0.0
    a, b = (x[differ].astype(np.float64) for x in (found, want))
    if found.dtype == np.int8:
        error = np.abs(a - b)
    else:
        error = np.abs(a - b) / (1 + (np.abs(b) if is_stored else np.nanmax(np.abs(b))))
    return float(np.where(np.isfinite(error), error, np.inf).max())


def rows_of(page_size: int) -> dict[str, Rows]:
    """Steps by name: (cached tokens, new tokens) of each row."""
    S = page_size
    return {
        "decode": ((0, 1), (S - 1, 1), (S, 1), (2 * S + 2, 1), (0, 0), (BEHIND, 1)),
        "prefill": ((0, S), (0, 1), (0, 2 * S + 3), (BEHIND, 70)),
        "mixed": ((0, S + 1), (7, 0), (2 * S, 1), (0, 0), (S - 1, 3), (3, 1)),
        "long": ((LONG_CONTEXT, 1), (9, 1)),
    }


def attention_trial(
    shape: AttentionShape, arch: str, name: str, rows: Rows, multiprocessors: int = 0
) -> Trial:
    """Trial of update_and_attend of one layer; its plan has all kernels that the rows need."""
    rng = np.random.default_rng(len(rows) * 1000 + shape.cache.head_dim)
    cache = shape.cache
    cached, new = (np.array([row[i] for row in rows], np.int32) for i in (0, 1))
    offsets = np.concatenate([[0], np.cumsum(new)]).astype(np.int32)
    table, slots = _pages(rows, cache.page_size, rng)
    kind, total = DTYPES[cache.dtype].numpy, int(offsets[-1])
    q = rng.standard_normal((total, shape.heads, cache.head_dim)).astype(kind)
    k = rng.standard_normal((total, cache.kv_heads, cache.head_dim)).astype(kind)
    v = rng.standard_normal((total, cache.kv_heads, cache.v_width)).astype(kind)
    layer = cache.num_layers - 1
    pool, scales = _pool(shape, rows, table, slots, layer, rng)
    bounds = np.array([[new.max(), (cached + new).max()]], np.int32)
    given: dict[str, Array | None] = {
        "q": q,
        "kv_blocks": pool,
        "input_row_offsets": offsets,
        "cache_lengths": cached,
        "lookup_table": table,
        "k": k,
        "v": v,
        "cos_sin": _cos_sin(shape, int(bounds[0, 1])),
        "kv_scales": scales,
        "sinks": rng.standard_normal(shape.heads).astype("f4") if shape.sinks else None,
        "q_norm": rng.standard_normal(cache.head_dim).astype(kind) if shape.norm else None,
        "k_norm": rng.standard_normal(cache.head_dim).astype(kind) if shape.norm else None,
    }
    wanted = _reference(shape, {**given, "max_lengths": bounds}, layer)
    held = {key: array for key, array in given.items() if array is not None}
    held["out"] = np.full((total, shape.heads, cache.v_width), np.nan, kind)
    sizes = Sizes(len(rows), total, int(bounds[0, 0]), int(bounds[0, 1]), table.shape[1])
    plan = launch.plan_update_and_attend(shape, arch, sizes, layer, multiprocessors=multiprocessors)
    return Trial(name, plan, held, wanted)


def _pages(rows: Rows, page_size: int, rng: np.random.Generator) -> tuple[Array, int]:
    """A lookup table of shuffled pages, with null pages where a row owns none, and the number of
    page slots."""
    counts = [ceildiv(cached + new, page_size) for cached, new in rows]
    usable = sum(counts) + SPARE_PAGES
    pages = rng.permutation(usable)
    table = np.full((len(rows), max(counts) + 1), usable, np.int32)
    for row, count in enumerate(counts):
        table[row, :count], pages = pages[:count], pages[count:]
        if not rows[row][1]:
            table[row] = usable
    return table, usable + 1


def _pool(
    shape: AttentionShape,
    rows: Rows,
    table: Array,
    slots: int,
    layer: int,
    rng: np.random.Generator,
) -> tuple[Array, Array | None]:
    """The pool and its scales: NaN (-128 for int8), except for the cached tokens of rows."""
    cache = shape.cache
    S, K, D = cache.page_size, cache.kv_heads, cache.head_dim
    pool = np.zeros((slots, 2, cache.num_layers, S, K, D), DTYPES[cache.pool_dtype].numpy)
    pool[...] = -128 if cache.pool_dtype == "int8" else np.nan
    scales = None
    if cache.granularity:
        groups = ceildiv(D, cache.granularity)
        scales = np.full((*pool.shape[:-1], groups), np.nan, np.float32)
    for row, (cached, new) in enumerate(rows):
        if not new:
            continue
        pages, at = token_slots(np.array([0, cached]), np.zeros(1, int), table[row : row + 1], S)
        for half, width in enumerate((D, cache.v_width)):
            x = rng.standard_normal((cached, K, width)).astype(np.float32)
            if scales is not None and x.size:
                groups = ceildiv(width, cache.granularity)
                x, scale = quantize(x, cache.pool_dtype, groups)
                scales[pages, half, layer, at, :, :groups] = scale
            pool[pages, half, layer, at, :, :width] = x.astype(pool.dtype)
    return pool, scales


def _cos_sin(shape: AttentionShape, positions: int) -> Array | None:
    if shape.rope is None:
        return None
    half = shape.rope.rotary_dim // 2
    angles = np.arange(positions)[:, None] * 10000.0 ** -(np.arange(half) / half)
    return np.concatenate([np.cos(angles), np.sin(angles)], -1).astype(np.float32)


def _reference(
    shape: AttentionShape, given: Mapping[str, Array | None], layer: int
) -> dict[str, Array]:
    """Results of the op's reference, on copies of the arrays that it mutates."""
    held = {name: None if a is None else a.copy() for name, a in given.items()}
    cache = shape.cache
    attributes: dict[str, float] = {
        "layer": layer,
        "scale": shape.scale,
        "window": shape.window,
        "chunked": int(shape.chunked),
        "softcap": shape.softcap,
        "causal": int(shape.causal),
        "v_head_dim": cache.v_head_dim,
        "rope_style": int(bool(shape.rope and shape.rope.interleaved)),
        "norm_epsilon": shape.norm.epsilon if shape.norm else 0.0,
        "norm_offset": shape.norm.offset if shape.norm else 0.0,
    }
    named = {a.name for a in UPDATE_AND_ATTEND.attributes}
    with np.errstate(all="ignore"):
        out = UPDATE_AND_ATTEND.reference(
            *(held[operand.name] for operand in UPDATE_AND_ATTEND.inputs),
            **{name: value for name, value in attributes.items() if name in named},
        )
    wanted = {"out": out, "kv_blocks": held["kv_blocks"], "kv_scales": held["kv_scales"]}
    return {name: array for name, array in wanted.items() if array is not None}


def rows_trials(variant: Variant) -> Iterator[Trial]:
    """Yield two trials of rms_norm, silu_mul, route or increment_cache_lengths: with one row, and
    with more rows than a block has."""
    for count in (1, 19):
        if variant.kernel.name == "route":
            yield route_trial(RouteShape.of_variant(variant), count)
        else:
            yield _rows_trial(variant, count)


def _rows_trial(variant: Variant, count: int) -> Trial:
    rng = np.random.default_rng(count)
    name, constants = variant.kernel.name, variant.constants
    if name == "increment_cache_lengths":
        lengths, new = (rng.integers(0, 90, 30 * count).astype(np.int32) for _ in range(2))
        offsets = np.concatenate([[0], np.cumsum(new)]).astype(np.int32)
        given = {"cache_lengths": lengths, "input_row_offsets": offsets}
        return Trial(
            name, launch.plan_increment(len(lengths)), given, {"cache_lengths": lengths + new}
        )
    kind, width = DTYPES[variant.dtype].numpy, int(str(constants["WIDTH"]))
    if name == "silu_mul":
        strides = [int(str(constants[f"{which}_STRIDE"])) for which in ("GATE", "UP")]
        gate, up = (rng.standard_normal((count, stride)).astype(kind) for stride in strides)
        given = {"gate": gate, "up": up, "out": np.zeros((count, width), kind)}
        want = SILU_MUL.reference(gate[:, :width], up[:, :width])
        return Trial(name, launch.plan_silu_mul(variant, count), given, {"out": want})
    stride = int(str(constants["X_STRIDE"]))
    x, residual = (rng.standard_normal((count, n)).astype(kind) for n in (stride, width))
    weight = rng.standard_normal(width).astype(kind)
    given = {"x": x, "weight": weight, "out": np.zeros((count, width), kind)}
    if constants["RESIDUAL"]:
        given["residual"] = residual
    named = {
        "epsilon": constants["EPSILON"],
        "weight_offset": constants["WEIGHT_OFFSET"],
        "round_first": int(bool(constants["ROUND_FIRST"])),
    }
    total = residual.copy() if constants["RESIDUAL"] else None
    wanted = {"out": RMS_NORM.reference(x[:, :width], weight, total, **named)}
    if total is not None:
        wanted["residual"] = total
    return Trial(name, launch.plan_rms_norm(variant, count), given, wanted)


def route_trial(shape: RouteShape, rows: int) -> Trial:
    """Trial of route; the logits of a row differ enough that only a wrong kernel chooses other
    experts."""
    rng = np.random.default_rng(rows)
    steps = np.linspace(-3, 4, shape.num_experts)
    logits = np.stack([rng.permutation(steps) for _ in range(rows)])
    given: dict[str, Array | None] = {
        "logits": logits.astype(DTYPES[shape.dtype].numpy),
        "bias": rng.integers(0, 3, shape.num_experts).astype(np.float32)
        if shape.has_bias
        else None,
    }
    wanted = ROUTE.reference(given["logits"], given["bias"], **shape.attributes)
    held = {name: array for name, array in given.items() if array is not None}
    held["indices"] = np.full((rows, shape.num_active), -1, np.int32)
    held["weights"] = np.full((rows, shape.num_active), np.nan, np.float32)
    names = ("indices", "weights")
    return Trial("route", plan_route(shape, rows), held, dict(zip(names, wanted, strict=True)))
