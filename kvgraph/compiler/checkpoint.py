"""A checkpoint's values, in pieces: never all at once.

Decision: the library checks a shard's header, and plain reads get the values: its torch tensors
are views of a private mapping of the whole shard, which a machine with less memory refuses.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

from kvgraph.compiler.values import Cast, Cut, Share, Values


@dataclass(frozen=True)
class Checkpoint:
    """Where the values of a module's fake parameters are, by the module's own names."""

    values: Mapping[str, Values]

    def has(self, name: str) -> bool:
        return name in self.values

    def renamed(self, prefix: str) -> Checkpoint:
        """For a module that holds this one under `prefix`."""
        return Checkpoint({prefix + name: each for name, each in self.values.items()})

    def cut(self, shares: Mapping[str, Share]) -> Checkpoint:
        """For a rank that has these shares of the parameters."""
        own = {name: Cut(self.values[name], share) for name, share in shares.items()}
        return Checkpoint({**self.values, **own})

    def get(self, name: str, dtype: torch.dtype) -> Values:
        """The tensor in `dtype`: ModelError, as it is read, for a number that is not finite."""
        return Cast(self.values[name], dtype)

    def read(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """The whole tensor in `dtype`."""
        source = self.get(name, dtype)
        out = torch.empty((source.count, *source.shape[1:]), dtype=dtype)
        filled = 0
        for piece in source.pieces():
            out[filled : filled + len(piece)] = piece
            filled += len(piece)
        return out.reshape(source.shape)

    def fill_buffers(self, module: nn.Module) -> None:
        """Give the module's buffers, which are small and real, those values that are stored."""
        for name, buffer in module.named_buffers():
            if self.has(name):
                buffer.copy_(self.read(name, buffer.dtype))

    def fill(self, module: nn.Module) -> None:
        """Give the module's parameters their values."""
        made: dict[torch.Tensor, nn.Parameter] = {}
        for path, part in module.named_modules():
            for own, fake in part._parameters.items():
                name = f"{path}.{own}" if path else own
                if fake is not None and self.has(name):
                    if fake not in made:
                        value = self.read(name, fake.dtype)
                        made[fake] = nn.Parameter(value, requires_grad=False)
                    part._parameters[own] = made[fake]
