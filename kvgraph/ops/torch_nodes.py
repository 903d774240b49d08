"""Calls of kvgraph's ops in a torch graph, described by shapes, dtypes and attributes."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from kvgraph.ops.spec import OpSpec


@dataclass(frozen=True)
class Call:
    """A node's operands by name, without those that are left out, and all attributes."""

    dtypes: dict[str, str]
    shapes: dict[str, tuple[int, ...]]
    """Shape of each operand; a symbolic extent is -1."""
    attributes: dict[str, float]
    strides: dict[str, int]
    """Elements from row to row of each operand; 0 if rows are not equally far apart."""

    @classmethod
    def of(cls, spec: OpSpec, node: Node) -> Call:
        given = spec.arguments(node.args, node.kwargs)
        values = {o.name: given[o.name] for o in spec.inputs if given[o.name] is not None}
        tensors = {name: value.meta["val"] for name, value in values.items()}
        return cls(
            {name: str(t.dtype).removeprefix("torch.") for name, t in tensors.items()},
            {name: tuple(map(_extent, t.shape)) for name, t in tensors.items()},
            {a.name: given[a.name] for a in spec.attributes},
            {name: row_stride(t) or 0 for name, t in tensors.items()},
        )


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether the tensor is row-major for every value of its symbolic dims."""
    step: int | torch.SymInt = 1
    for extent, stride in zip(reversed(tensor.shape), reversed(tensor.stride()), strict=True):
        if not statically_known_true(extent == 1) and not statically_known_true(stride == step):
            return False
        step = step * extent
    return True


def row_stride(tensor: torch.Tensor) -> int | None:
    """Elements from one row of the last dim to the next, the same for every value of symbolic dims;
    for a single row its width. None if rows are not equally far apart, or share elements."""
    if not tensor.dim():
        return None
    *outer, (width, step) = zip(tensor.shape, tensor.stride(), strict=True)
    found: int | torch.SymInt | None = None
    expected: int | torch.SymInt = 0
    stride: int | torch.SymInt
    for extent, stride in reversed(outer):
        if statically_known_true(extent == 1):
            continue
        if found is None:
            found = expected = stride
        if not statically_known_true(stride == expected):
            return None
        expected = expected * extent
    stride = width if found is None else found
    if not statically_known_true(step == 1) or not isinstance(width, int):
        return None
    return stride if isinstance(stride, int) and stride >= width else None


def _extent(extent: object) -> int:
    return extent if isinstance(extent, int) else -1
