"""A checkpoint's values, read in pieces and never all at once.

Decision: the safetensors library checks a shard's header; plain file reads get the values. The
library's torch tensors are views of a private mapping of the whole shard, which fails on a machine
with less memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

from kvgraph.compiler.values import Cast, Cut, Share, Values


@dataclass(frozen=True)
class Checkpoint:
    """Sources of the values of a module's fake parameters, by the module's own names."""

    values: Mapping[str, Values]

    def has(self, name: str) -> bool:
        return name in self.values

    def renamed(self, prefix: str) -> Checkpoint:
        """The checkpoint of a module that holds this one's module under `prefix`."""
        return Checkpoint({prefix + name: each for name, each in self.values.items()})

    def cut(self, shares: Mapping[str, Share]) -> Checkpoint:
        """The checkpoint of a rank that has these shares of the parameters; others stay whole."""
        own = {name: Cut(self.values[name], share) for name, share in shares.items()}
        return Checkpoint({**self.values, **own})

    def get(self, name: str, dtype: torch.dtype) -> Values:
        """The source of parameter `name` in `dtype`. A number that is not finite raises ModelError
        when it is read."""
        return Cast(self.values[name], dtype)

    def read(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """The whole tensor `name` in `dtype`. ModelError for a number that is not finite."""
        source = self.get(name, dtype)
        out = torch.empty((source.count, *source.shape[1:]), dtype=dtype)
        filled = 0
        for piece in source.pieces():
            out[filled : filled + len(piece)] = piece
            filled += len(piece)
        return out.reshape(source.shape)

    def fill_buffers(self, module: nn.Module) -> None:
        """Copy stored values into the module's buffers, which are small and not fake."""
        for name, buffer in module.named_buffers():
            if self.has(name):
                buffer.copy_(self.read(name, buffer.dtype))

    def fill(self, module: nn.Module) -> None:
        """Replace the module's fake parameters by real ones; shared parameters stay shared."""
        made: dict[torch.Tensor, nn.Parameter] = {}
        for path, part in module.named_modules():
            for own, fake in part._parameters.items():
                name = f"{path}.{own}" if path else own
                if fake is not None and self.has(name):
                    if fake not in made:
                        value = self.read(name, fake.dtype)
                        made[fake] = nn.Parameter(value, requires_grad=False)
                    part._parameters[own] = made[fake]
