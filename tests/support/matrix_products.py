"""Shapes of matrix products that kernels are tested on, and their steps by any runner."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from kvgraph.kernels.experts_plan import ExpertsShape
from kvgraph.kernels.linear_plan import LinearShape
from kvgraph.kernels.matrix_tiles import ROLES
from kvgraph.kernels.matrix_trials import experts_trial, linear_trials
from kvgraph.kernels.trials import Trial
from kvgraph.ops.packed import E2M1, E4M3, GELU, GELU_TANH, INT8, SILU

Shape = ExpertsShape | LinearShape

# Widths that fill no tile and no group, every gate, with and without biases.
EXPERTS = (
    ExpertsShape("float32", 0, 5, 2, 72, 40, SILU),
    ExpertsShape("bfloat16", 0, 4, 2, 160, 96, SILU, 1.702, 0.9, 1.0, True, True),
    ExpertsShape("float16", 0, 9, 3, 128, 64, GELU),
    ExpertsShape("bfloat16", 0, 1, 1, 64, 200, GELU_TANH, down_bias=True),
    ExpertsShape("bfloat16", 8, 4, 2, 160, 96, SILU, up_bias=True),
    ExpertsShape("bfloat16", 4, 4, 2, 256, 200, GELU_TANH, down_bias=True),
    ExpertsShape("bfloat16", 4, 4, 2, 160, 96, group=32, codes=E2M1, up_bias=True),
    ExpertsShape("float16", 4, 4, 2, 128, 64, group=64, up_offsets=True),
    ExpertsShape("bfloat16", 8, 4, 2, 160, 96, group=128, codes=E4M3),
    *(ExpertsShape("bfloat16", bits, 3, 2, 680, 328) for bits in (8, 4)),  # several steps
)
LINEARS = (
    LinearShape("float32", 8, 72, (40, 0, 0)),
    LinearShape("bfloat16", 8, 160, (96, 48, 40), bias=True),
    LinearShape("bfloat16", 8, 200, (72, 0, 0), gated=True),
    LinearShape("float16", 4, 256, (64, 32, 0)),
    LinearShape("bfloat16", 4, 200, (72, 0, 0), gated=True, bias=True),
    LinearShape("bfloat16", 4, 160, (64, 32, 0), bias=True, group=32, offsets=True),
    LinearShape("float16", 4, 200, (72, 0, 0), gated=True, group=128, offsets=True),
    LinearShape("bfloat16", 4, 96, (72, 0, 0), group=32, codes=E2M1),
    LinearShape("float16", 8, 200, (72, 0, 0), group=64, codes=INT8),
    LinearShape("bfloat16", 8, 200, (72, 0, 0), gated=True, group=128, codes=E4M3),
    LinearShape("float32", 8, 96, (40, 0, 0), group=32, codes=E4M3),
    # Several steps of slices, and a last one that not all slices have.
    LinearShape("bfloat16", 8, 1160, (40, 0, 0)),
    LinearShape("bfloat16", 4, 1160, (40, 0, 0)),
    LinearShape("float16", 4, 608, (40, 0, 0), group=32, offsets=True),
    LinearShape("bfloat16", 8, 1160, (40, 0, 0), group=128, codes=E4M3),
    LinearShape("bfloat16", 8, 584, (40, 0, 0), group=64, codes=INT8),
    # Rows that are rounded too, in one step and in several parts.
    LinearShape("bfloat16", 8, 200, (72, 0, 0), gated=True, codes=E4M3, rounds=True),
    LinearShape("float16", 8, 208, (64, 40, 0), bias=True, group=128, codes=E4M3, rounds=True),
    LinearShape("bfloat16", 8, 1160, (40, 0, 0), codes=E4M3, rounds=True),
    LinearShape("bfloat16", 8, 1160, (40, 0, 0), group=128, codes=E4M3, rounds=True),
    LinearShape("bfloat16", 8, 208, (64, 32, 16), bias=True, codes=E4M3, rounds=True),
    LinearShape("bfloat16", 8, 160, (96, 48, 40), bias=True, rounds=True),
    LinearShape("float16", 8, 1160, (40, 0, 0), rounds=True),
)
SHAPES: tuple[Shape, ...] = (*EXPERTS, *LINEARS)

# Of models that run on one GPU.
QWEN3_30B = ExpertsShape("bfloat16", 0, 128, 8, 2048, 768)
LLAMA_8B = {
    "q, k and v": LinearShape("bfloat16", 8, 4096, (4096, 1024, 1024)),
    "gate and up": LinearShape("bfloat16", 8, 4096, (14336, 0, 0), gated=True),
    "down": LinearShape("bfloat16", 8, 14336, (4096, 0, 0)),
}


def name_of(shape: Shape) -> str:
    if isinstance(shape, LinearShape):
        columns = "+".join(map(str, shape.out_features)) + "-gated" * shape.gated
        return f"{shape.dtype}-{_form(shape)}-{shape.in_features}x{columns}"
    widths = f"{shape.experts}x{shape.in_features}x{shape.inner_features}"
    return f"{shape.dtype}-{_form(shape)}-{widths}"


def _form(shape: Shape) -> str:
    form = f"{shape.bits}" + f".{shape.group}.{shape.codes}" * bool(shape.group or shape.codes)
    return form + "-rounds" * (isinstance(shape, LinearShape) and shape.rounds)


def trials_of(shape: Shape, arch: str) -> dict[str, Callable[[], Trial]]:
    """By name, what launches all kernels of `shape`."""
    if isinstance(shape, LinearShape):
        return linear_trials(shape, arch)
    return {role: partial(experts_trial, shape, arch, role) for role in ROLES}


def trials(arch: str) -> Iterator[tuple[str, Trial]]:
    for shape in SHAPES:
        for name, trial in trials_of(shape, arch).items():
            yield f"{name_of(shape)} {name}", trial()
