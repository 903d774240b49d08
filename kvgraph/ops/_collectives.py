"""all_reduce and all_gather: exchange between the ranks of a tensor-parallel graph.

Each rank runs the same graph over its part of the weights. The references here are for a group of
one rank; several ranks need one process each.
"""

from __future__ import annotations

import numpy as np

from kvgraph.contract.dims import Array
from kvgraph.errors import KernelError
from kvgraph.ops import spec


def all_reduce(x: Array, residual: Array | None = None, *, ranks: int) -> Array:
    """Reference for one rank: the sum with the residual, in float32, rounded at the end."""
    _require_one("all_reduce", ranks)
    if residual is None:
        return x.copy()
    total: Array = (x.astype(np.float32) + residual.astype(np.float32)).astype(x.dtype)
    return total


def all_gather(x: Array, *, ranks: int, out_width: int) -> Array:
    """Reference for one rank: a copy of `x`."""
    _require_one("all_gather", ranks)
    return x.copy()


def _require_one(op: str, ranks: int) -> None:
    if ranks != 1:
        raise KernelError(f"{op}: ranks: expected 1 of a reference without a group, got {ranks}")


def _ranks_fault(ranks: int) -> bool | str:
    return ranks < 1 and "at least 1"


def _width_fault(out_width: int, width: int, ranks: int) -> bool | str:
    return out_width != width * ranks and f"{width * ranks}, {width} of each of {ranks} ranks"


X = spec.Operand("x", ("rows", "width"), spec.ACTIVATION)
RANKS = spec.Attribute("ranks", "int")

ALL_REDUCE = spec.OpSpec(
    name="all_reduce",
    doc="The sum of x over all ranks, and a residual that is added once.",
    inputs=(X, spec.Operand("residual", ("rows", "width"), spec.ACTIVATION, optional=True)),
    outputs=(spec.Operand("out", ("rows", "width"), spec.ACTIVATION),),
    attributes=(RANKS,),
    reference=all_reduce,
    rules=(spec.Rule("ranks", _ranks_fault),),
)

ALL_GATHER = spec.OpSpec(
    name="all_gather",
    doc="The columns of x of all ranks next to each other, in the order of the ranks.",
    inputs=(X,),
    outputs=(spec.Operand("out", ("rows", "out_width"), spec.ACTIVATION),),
    attributes=(RANKS, spec.Attribute("out_width", "int")),
    reference=all_gather,
    rules=(spec.Rule("ranks", _ranks_fault), spec.Rule("out_width", _width_fault)),
)
