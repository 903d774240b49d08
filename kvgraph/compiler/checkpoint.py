"""A checkpoint's values, in pieces: never all at once.

Decision: the library checks a shard's header, and plain reads get the values: its torch tensors
are views of a private mapping of the whole shard, which a machine with less memory refuses.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from kvgraph.compiler import values
from kvgraph.compiler.values import Cut, Rows, Share, Values
from kvgraph.errors import ModelError


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

    def open(self, name: str, dtype: torch.dtype) -> Rows:
        """What reads rows of the tensor in `dtype`.

        ModelError, as it reads, for a number that is not finite, in the shard or in `dtype`.
        """
        source = self.values[name]
        rows = source.open()

        def cast(start: int, stop: int) -> torch.Tensor:
            piece = rows(start, stop)
            made = piece.to(dtype)
            _require_finite(source, start, piece, made)
            return made

        return cast

    def pieces(self, name: str, dtype: torch.dtype) -> Iterator[torch.Tensor]:
        """The tensor's rows in order, in `dtype`, a few at a time."""
        source, rows = self.values[name], self.open(name, dtype)
        row_bytes = torch.Size(source.shape[1:]).numel() * dtype.itemsize
        step = max(1, values.PIECE_BYTES // max(1, row_bytes))
        for start in range(0, source.count, step):
            yield rows(start, min(start + step, source.count))

    def read(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """The whole tensor in `dtype`."""
        source = self.values[name]
        out = torch.empty((source.count, *source.shape[1:]), dtype=dtype)
        filled = 0
        for piece in self.pieces(name, dtype):
            out[filled : filled + len(piece)] = piece
            filled += len(piece)
        return out.reshape(source.shape)

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


def _require_finite(source: Values, row: int, piece: torch.Tensor, cast: torch.Tensor) -> None:
    # The extremes cost a fiftieth of a look at each element, and a NaN is both.
    if not cast.numel() or all(extreme.isfinite() for extreme in torch.aminmax(cast)):
        return
    at = tuple(int(i) for i in (~cast.isfinite()).nonzero()[0])
    index = [at[0] + row, *at[1:]] if source.shape else ""
    holds = str(cast.dtype).removeprefix("torch.")
    raise ModelError(
        f"{source.where}{index}: expected a finite number in {holds}, got {float(piece[at]):g}"
    )
