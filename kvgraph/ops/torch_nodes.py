"""Calls of our ops in a torch graph, as what shapes and dtypes say of them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.fx import Node
from torch.fx.experimental.symbolic_shapes import statically_known_true

from kvgraph.ops.spec import OpSpec


@dataclass(frozen=True)
class Call:
    """A node's operands by name, those that are left out missing, and all attributes."""

    dtypes: dict[str, str]
    shapes: dict[str, tuple[int, ...]]
    """A symbolic extent is -1."""
    attributes: dict[str, float]

    @classmethod
    def of(cls, spec: OpSpec, node: Node) -> Call:
        given = spec.arguments(node.args, node.kwargs)
        values = {o.name: given[o.name] for o in spec.inputs if given[o.name] is not None}
        tensors = {name: value.meta["val"] for name, value in values.items()}
        return cls(
            {name: str(t.dtype).removeprefix("torch.") for name, t in tensors.items()},
            {name: tuple(map(_extent, t.shape)) for name, t in tensors.items()},
            {a.name: given[a.name] for a in spec.attributes},
        )


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether it is row-major for every value of its symbolic dims."""
    step: int | torch.SymInt = 1
    for extent, stride in zip(reversed(tensor.shape), reversed(tensor.stride()), strict=True):
        if not statically_known_true(extent == 1) and not statically_known_true(stride == step):
            return False
        step = step * extent
    return True


def _extent(extent: object) -> int:
    return extent if isinstance(extent, int) else -1
