"""Shapes of matrix products that kernels are tested on, and their steps by any runner."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from kvgraph.kernels.experts_plan import ExpertsShape
from kvgraph.kernels.linear_plan import LinearShape
from kvgraph.kernels.matrix_tiles import ROLES
from kvgraph.kernels.matrix_trials import experts_trial, linear_trials
from kvgraph.kernels.trials import Trial
from kvgraph.ops.packed import E2M1, E4M3, EIGHTHS, GELU, GELU_TANH, INT8, INTEGERS, Form

Shape = ExpertsShape | LinearShape


def experts(
    dtype: str, form: Form, *sizes: int, down: Form | None = None, **gate: Any
) -> ExpertsShape:
    """`sizes`: experts, active, in_features, inner_features. `down`: its form, if it is another."""
    return ExpertsShape(dtype, form, down or form, *sizes, **gate)


def in_form(
    shape: Shape, bits: int, group: int = 0, codes: int = INTEGERS, offsets: bool = False
) -> Shape:
    """`shape` with all its weights in one form."""
    form = Form(bits, group, codes, offsets)
    if isinstance(shape, LinearShape):
        return replace(shape, form=form)
    return replace(shape, up=form, down=form)


def has_groups(shape: Shape) -> bool:
    forms = [shape.form] if isinstance(shape, LinearShape) else [shape.up, shape.down]
    return any(form.group for form in forms)


PLAIN, INT8_ROWS, NIBBLES = Form(0), Form(8), Form(4)
GPT_OSS = {"alpha": 1.702, "limit": 0.9, "up_offset": 1.0}
# Widths that fill no tile and no group, every gate, with and without biases.
EXPERTS = (
    experts("float32", PLAIN, 5, 2, 72, 40),
    experts("bfloat16", PLAIN, 4, 2, 160, 96, **GPT_OSS, up_bias=True, down_bias=True),
    experts("float16", PLAIN, 9, 3, 128, 64, activation=GELU),
    experts("bfloat16", PLAIN, 1, 1, 64, 200, activation=GELU_TANH, down_bias=True),
    experts("bfloat16", INT8_ROWS, 4, 2, 160, 96, up_bias=True),
    experts("bfloat16", NIBBLES, 4, 2, 256, 200, activation=GELU_TANH, down_bias=True),
    experts("bfloat16", Form(4, 32, E2M1), 4, 2, 160, 96, up_bias=True),
    experts("float16", Form(4, 64, INTEGERS, True), 4, 2, 128, 64, down=Form(4, 64)),
    experts("bfloat16", Form(8, 128, E4M3), 4, 2, 160, 96),
    experts("bfloat16", INT8_ROWS, 3, 2, 680, 328),  # several steps
    experts("bfloat16", NIBBLES, 3, 2, 680, 328),
    experts("bfloat16", Form(4, 32, EIGHTHS, True), 4, 2, 160, 96),
    # A form for each layer.
    experts("bfloat16", NIBBLES, 4, 2, 160, 96, down=INT8_ROWS, up_bias=True),
    experts("bfloat16", Form(8, 128, E4M3), 4, 2, 160, 96, down=Form(4, 32, E2M1)),
    experts("float16", Form(4, 64, INTEGERS, True), 4, 2, 128, 64, down=PLAIN),
)
LINEARS = (
    LinearShape("float32", Form(8), 72, (40, 0, 0)),
    LinearShape("bfloat16", Form(8), 160, (96, 48, 40), bias=True),
    LinearShape("bfloat16", Form(8), 200, (72, 0, 0), gated=True),
    LinearShape("float16", Form(4), 256, (64, 32, 0)),
    LinearShape("bfloat16", Form(4), 200, (72, 0, 0), gated=True, bias=True),
    LinearShape("bfloat16", Form(4, 32, has_offsets=True), 160, (64, 32, 0), bias=True),
    LinearShape("float16", Form(4, 128, has_offsets=True), 200, (72, 0, 0), gated=True),
    LinearShape("bfloat16", Form(4, 32, E2M1), 96, (72, 0, 0)),
    LinearShape("float16", Form(8, 64, INT8), 200, (72, 0, 0)),
    LinearShape("bfloat16", Form(8, 128, E4M3), 200, (72, 0, 0), gated=True),
    LinearShape("float32", Form(8, 32, E4M3), 96, (40, 0, 0)),
    LinearShape("bfloat16", Form(4, 32, EIGHTHS, has_offsets=True), 200, (72, 0, 0), gated=True),
    LinearShape("float16", Form(4, 32, EIGHTHS, has_offsets=True), 608, (40, 0, 0)),
    # Several steps of slices, and a last one that not all slices have.
    LinearShape("bfloat16", Form(8), 1160, (40, 0, 0)),
    LinearShape("bfloat16", Form(4), 1160, (40, 0, 0)),
    LinearShape("float16", Form(4, 32, has_offsets=True), 608, (40, 0, 0)),
    LinearShape("bfloat16", Form(8, 128, E4M3), 1160, (40, 0, 0)),
    LinearShape("bfloat16", Form(8, 64, INT8), 584, (40, 0, 0)),
    # Rows that are rounded too, in one step and in several parts.
    LinearShape("bfloat16", Form(8, codes=E4M3), 200, (72, 0, 0), gated=True, rounds=True),
    LinearShape("float16", Form(8, 128, E4M3), 208, (64, 40, 0), bias=True, rounds=True),
    LinearShape("bfloat16", Form(8, codes=E4M3), 1160, (40, 0, 0), rounds=True),
    LinearShape("bfloat16", Form(8, 128, E4M3), 1160, (40, 0, 0), rounds=True),
    LinearShape("bfloat16", Form(8, codes=E4M3), 208, (64, 32, 16), bias=True, rounds=True),
    LinearShape("bfloat16", Form(8), 160, (96, 48, 40), bias=True, rounds=True),
    LinearShape("float16", Form(8), 1160, (40, 0, 0), rounds=True),
)
SHAPES: tuple[Shape, ...] = (*EXPERTS, *LINEARS)

# Of models that run on one GPU.
QWEN3_30B = experts("bfloat16", PLAIN, 128, 8, 2048, 768)
LLAMA_8B = {
    "q, k and v": LinearShape("bfloat16", Form(8), 4096, (4096, 1024, 1024)),
    "gate and up": LinearShape("bfloat16", Form(8), 4096, (14336, 0, 0), gated=True),
    "down": LinearShape("bfloat16", Form(8), 14336, (4096, 0, 0)),
}


def name_of(shape: Shape) -> str:
    if isinstance(shape, LinearShape):
        columns = "+".join(map(str, shape.out_features)) + "-gated" * shape.gated
        form = _form(shape.form) + "-rounds" * shape.rounds
        return f"{shape.dtype}-{form}-{shape.in_features}x{columns}"
    widths = f"{shape.experts}x{shape.in_features}x{shape.inner_features}"
    forms = "+".join(dict.fromkeys(map(_form, (shape.up, shape.down))))
    return f"{shape.dtype}-{forms}-{widths}"


def _form(form: Form) -> str:
    groups = f".{form.group}.{form.codes}" * bool(form.group or form.codes)
    return f"{form.bits}{groups}"


def trials_of(shape: Shape, arch: str) -> dict[str, Callable[[], Trial]]:
    """By name, what launches all kernels of `shape`."""
    if isinstance(shape, LinearShape):
        return linear_trials(shape, arch)
    return {role: partial(experts_trial, shape, arch, role) for role in ROLES}


def trials(arch: str) -> Iterator[tuple[str, Trial]]:
    for shape in SHAPES:
        for name, trial in trials_of(shape, arch).items():
            yield f"{name_of(shape)} {name}", trial()
