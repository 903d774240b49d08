"""Small steps for the kernels of matrix products, with the expected results of the references.

Only experts that some row may choose are given: a kernel that reads another one leaves its buffer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial

import numpy as np

from kvgraph.contract.dims import Array
from kvgraph.contract.dtypes import DTYPES
from kvgraph.kernels.experts_plan import ExpertsShape, plan_experts
from kvgraph.kernels.linear_plan import (
    SPLIT_SUFFIX,
    LinearShape,
    has_parts,
    is_expanded,
    is_library,
    plan_expand,
    plan_join,
    plan_linear,
    plan_round,
    roles_of,
)
from kvgraph.kernels.trials import Trial
from kvgraph.kernels.variants import EXPERTS_UP, PLACE_TILES, Variant
from kvgraph.ops import FUSED_EXPERTS, QUANTIZED_LINEAR, matrices, packed
from kvgraph.ops._linear import OUT_FEATURES
from kvgraph.ops.packed import E2M1, E4M3, EIGHTHS, INT8, WITH_OFFSETS, Form

WIDTHS = ("OUT", "OUT_1", "OUT_2")
SIZES = ("IN", "INNER", "BLOCK_M")
"""Constants that both kernels of an experts layer share, whatever the forms of their weights."""
OUTS = tuple(operand.name for operand in QUANTIZED_LINEAR.outputs)
ROWS = {"few": 18, "many": 70, "rows16": 10, "rows32": 20, "rows64": 40, "rows128": 70}
"""Rows of a step by the role of its tiles. An expert that all rows choose has two tiles, and so has
a layer of few rows. Larger tiles of a layer are single: its PTX takes minutes on a CPU."""

EXPAND, RESTORE, JOIN = "expand", "restore", "join"
"""Trials of a layer without a product: an expanded weight, restored rows, and outputs from a
library's product."""

FEW = 3
"""Rows of a trial without a product."""

LARGEST = {E2M1: 6.0, E4M3: 448.0, INT8: 128.0, EIGHTHS: 8.0}

SPARE = 2
"""Experts of a trial beyond the number that one row chooses."""


def experts_shapes(down: Variant, known: Iterable[Variant]) -> Iterator[ExpertsShape]:
    """Yield the shapes that `down` may have been compiled for: one for each kernel of a first layer
    of these sizes, in any form, and each number of experts, among the `known` kernels."""
    kernels = list(known)
    for up in kernels:
        if up.kernel is not EXPERTS_UP or (up.role, up.dtype) != (down.role, down.dtype):
            continue
        if any(up.constants[name] != down.constants[name] for name in SIZES):
            continue
        for place in kernels:
            if (
                place.kernel is PLACE_TILES
                and place.constants["BLOCK_M"] == up.constants["BLOCK_M"]
            ):
                yield _shape(up, down, int(str(place.constants["EXPERTS"])))


def _shape(up: Variant, down: Variant, experts: int) -> ExpertsShape:
    given = {name: str(value) for name, value in up.constants.items()}
    return ExpertsShape(
        dtype=up.dtype,
        up=_form(up, "up_group_bytes"),
        down=_form(down, "down_group_bytes"),
        experts=experts,
        active=int(given["ACTIVE"]),
        in_features=int(given["IN"]),
        inner_features=int(given["INNER"]),
        activation=int(given["ACTIVATION"]),
        alpha=float(given["ALPHA"]),
        limit=float(given["LIMIT"]),
        up_offset=float(given["UP_OFFSET"]),
        up_bias="up_bias" not in up.absent,
        down_bias="down_bias" not in down.absent,
    )


def _form(variant: Variant, group_bytes: str) -> Form:
    """The form of a kernel's weight. `group_bytes`: its operand with the bytes of groups."""
    bits, group, codes = (int(str(variant.constants[name])) for name in ("BITS", "GROUP", "CODES"))
    return Form(bits, group, codes, group_bytes not in variant.absent and codes in WITH_OFFSETS)


def experts_trial(shape: ExpertsShape, arch: str, name: str, rows: int = 0) -> Trial:
    """Trial of all kernels of fused_experts with the tiles of role `name`, "few" or "many"."""
    rows = rows or ROWS[name]
    rng = np.random.default_rng(rows)
    kind = DTYPES[shape.dtype].numpy
    given_experts = min(shape.experts, shape.active + SPARE)
    others = [1 + rng.permutation(given_experts - 1) for _ in range(rows)]
    ids = [rng.permutation([0, *each[: shape.active - 1]]) for each in others]
    if shape.active > 1:
        ids[-1][-1] = -1  # an expert that another rank has
    width, inner = shape.in_features, shape.inner_features
    given: dict[str, Array | None] = {
        "x": rng.standard_normal((rows, width)).astype(kind),
        "indices": np.array(ids, np.int32),
        "weights": rng.random((rows, shape.active)).astype(np.float32),
        **_weight(rng, "up", (given_experts, 2 * inner), width, shape, shape.up),
        **_weight(rng, "down", (given_experts, width), inner, shape, shape.down),
    }
    attributes = ("activation", "alpha", "limit", "up_offset")
    want = FUSED_EXPERTS.reference(
        *(given[operand.name] for operand in FUSED_EXPERTS.inputs),
        **shape.up.attributes("up_"),
        **shape.down.attributes("down_"),
        **{name: getattr(shape, name) for name in attributes},
    )
    held = {key: array for key, array in given.items() if array is not None}
    held["out"] = np.full((rows, width), np.nan, kind)
    return Trial(f"{name} rows", plan_experts(shape, arch, rows, name), held, {"out": want})


def linear_shape(variant: Variant) -> LinearShape:
    """The shape that a kernel of `quantized_linear` was compiled for."""
    given = {name: int(str(variant.constants[name])) for name in ("IN", *WIDTHS)}
    return LinearShape(
        dtype=variant.dtype,
        form=_form(variant, "group_bytes"),
        in_features=given["IN"],
        out_features=(given["OUT"], given["OUT_1"], given["OUT_2"]),
        gated=bool(variant.constants["GATED"]),
        bias="bias" not in variant.absent,
        rounds="x" in variant.absent,
    )


def linear_trial(shape: LinearShape, arch: str, name: str, rows: int = 0) -> Trial:
    """Trial of quantized_linear with the tiles of `name`, one of `linear_plan.roles_of`."""
    rows = rows or ROWS[name.removesuffix(SPLIT_SUFFIX)]
    rng = np.random.default_rng(rows)
    kind = DTYPES[shape.dtype].numpy
    given: dict[str, Array | None] = {
        "x": rng.standard_normal((rows, shape.in_features)).astype(kind),
        **_weight(rng, "", (shape.columns,), shape.in_features, shape, shape.form),
    }
    found = QUANTIZED_LINEAR.reference(
        *(given[operand.name] for operand in QUANTIZED_LINEAR.inputs),
        **shape.form.attributes(),
        silu_mul=int(shape.gated),
        x_bits=8 if shape.rounds else 0,
        **dict(zip(OUT_FEATURES, shape.out_features, strict=True)),
    )
    outs = zip(OUTS, found, strict=True)
    wanted = {out: array for out, array in outs if array.size}
    held = {key: array for key, array in given.items() if array is not None}
    held |= {out: np.full(array.shape, np.nan, kind) for out, array in wanted.items()}
    return Trial(f"{name} rows", plan_linear(shape, arch, rows, name), held, wanted)


def linear_trials(shape: LinearShape, arch: str) -> dict[str, Callable[[], Trial]]:
    """Trials, by name, that together launch all kernels of a layer."""
    found: dict[str, Callable[[], Trial]] = {
        role: partial(linear_trial, shape, arch, role) for role in roles_of(shape, arch)
    }
    if is_library(shape, arch) and has_parts(shape):
        found[JOIN] = partial(join_trial, shape)
    if is_expanded(shape, arch):
        found[EXPAND] = partial(expand_trial, shape, arch)
        if shape.rounds:
            found[RESTORE] = partial(restore_trial, shape)
    return found


def restore_trial(shape: LinearShape) -> Trial:
    """Trial of restored rows: rows of x, one of them zeros, rounded and restored to x's dtype."""
    x = np.random.default_rng(0).standard_normal((FEW, shape.in_features))
    x[1] = 0
    given = {"x": x.astype(DTYPES[shape.dtype].numpy)}
    wanted = {"restored": matrices.rounded(given["x"], shape.form.codes).astype(given["x"].dtype)}
    held = given | {"restored": np.full_like(given["x"], np.nan)}
    return Trial(RESTORE, plan_round(shape, FEW, restores=True), held, wanted)


def join_trial(shape: LinearShape) -> Trial:
    """Trial of outputs from a product: with its bias, and joined if it is gated."""
    rng, kind = np.random.default_rng(0), DTYPES[shape.dtype].numpy
    given = {"products": rng.standard_normal((FEW, shape.columns)).astype(kind)}
    y_MN = given["products"].astype(np.float32)
    if shape.bias:
        given["bias"] = rng.standard_normal(shape.columns).astype(kind)
        y_MN += given["bias"].astype(np.float32)
    if shape.gated:
        y_MN = packed.joined(y_MN[:, ::2], y_MN[:, 1::2])
    ends = np.cumsum(shape.out_features)[:-1]
    parts = zip(OUTS, np.split(y_MN, ends, axis=1), strict=True)
    wanted = {name: part.astype(kind) for name, part in parts if part.size}
    held = given | {name: np.full_like(part, np.nan) for name, part in wanted.items()}
    return Trial(JOIN, plan_join(shape, FEW), held, wanted)


def expand_trial(shape: LinearShape, arch: str) -> Trial:
    """Trial of an expanded weight, without its first two columns if it has more."""
    rng, first = np.random.default_rng(0), 2 if shape.columns > 2 else 0
    kind, columns = DTYPES[shape.dtype].numpy, shape.columns - first
    unbiased, inputs = replace(shape, bias=False), shape.in_features
    stored = _weight(rng, "", (shape.columns,), inputs, unbiased, shape.form)
    weight = stored["weight"]
    assert weight is not None
    form = shape.in_features, shape.form.bits, shape.form.group, shape.form.codes
    plain = matrices.decode(weight, stored["scales"], stored["group_bytes"], *form)[first:]
    if shape.gated:
        plain = np.concatenate([plain[::2], plain[1::2]])
    held = {key: array for key, array in stored.items() if array is not None}
    held["plain"] = np.full((columns, shape.in_features), np.nan, kind)
    wanted = {"plain": plain.astype(kind)}
    return Trial(EXPAND, plan_expand(shape, arch, first, columns), held, wanted)


def _weight(
    rng: np.random.Generator,
    name: str,
    leading: tuple[int, ...],
    inputs: int,
    shape: ExpertsShape | LinearShape,
    form: Form,
) -> dict[str, Array | None]:
    """A random stored weight whose products are about as large as its inputs; its key is "weight"
    if `name` is empty."""
    kind, prefix = DTYPES[shape.dtype].numpy, f"{name}_" if name else ""
    *stacked, columns = leading
    scale = inputs**-0.5
    given = ("scales", "group_bytes", "bias")
    found: dict[str, Array | None] = {f"{prefix}{operand}": None for operand in given}
    depth = matrices.depth_of(inputs, form.bits, form.group)
    groups = *stacked, matrices.groups_of(inputs, form.bits, form.group), columns
    if form.bits:
        found[name or "weight"] = _numbers(rng, (*leading, depth), form.codes)
        scale /= LARGEST[form.codes] if form.codes else 2 ** (form.bits - 1)
    else:
        found[name or "weight"] = (rng.standard_normal((*leading, depth)) * scale).astype(kind)
    if form.codes == E2M1:
        exponents = np.log2(scale) + rng.integers(126, 129, groups)
        found[f"{prefix}group_bytes"] = exponents.astype(np.uint8).view(np.int8)
    elif form.bits:
        found[f"{prefix}scales"] = (rng.uniform(0.5, 2.0, groups) * scale).astype(np.float32)
    if form.has_offsets:
        most = 127 if form.codes == EIGHTHS else 8
        found[f"{prefix}group_bytes"] = rng.integers(-most, most + 1, groups).astype(np.int8)
    if getattr(shape, f"{prefix}bias"):
        found[f"{prefix}bias"] = rng.standard_normal(leading).astype(kind)
    return found


def _numbers(rng: np.random.Generator, shape: tuple[int, ...], codes: int) -> Array:
    """Random bytes of all values that can be stored: no NaN of E4M3."""
    stored = rng.integers(-128, 128, shape).astype(np.int8)
    if codes != E4M3:
        return stored
    is_number = stored & 127 != 127
    return np.where(is_number, stored, 0).view(DTYPES["float8_e4m3fn"].numpy)
