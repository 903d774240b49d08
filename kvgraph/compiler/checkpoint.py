"""A checkpoint's values, in pieces: never all at once.

Decision: the library checks a shard's header, and plain reads get the values: its torch tensors
are views of a private mapping of the whole shard, which a machine with less memory refuses.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from io import FileIO

import torch

from kvgraph.compiler.shards import Stored
from kvgraph.contract.dtypes import ALL
from kvgraph.errors import ModelError

PIECE_BYTES = 16 << 20

READ_DTYPES = {
    dtype.safetensors: getattr(torch, dtype.name)
    for dtype in ALL
    if dtype.kind == "float" and not dtype.largest
}


@dataclass(frozen=True)
class Share:
    """The part of a tensor that a rank has: its share along `dim` of each of the `parts` that are
    packed there."""

    dim: int
    parts: int
    ranks: int
    rank: int

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        packed = tensor.chunk(self.parts, self.dim)
        shares = [each.chunk(self.ranks, self.dim)[self.rank] for each in packed]
        return torch.cat(shares, self.dim) if self.parts > 1 else shares[0]

    def rows(self, count: int) -> list[tuple[int, int]]:
        """Half-open ranges of the rows of `count` that hold it."""
        if self.dim:
            return [(0, count)]
        packed, own = count // self.parts, count // self.parts // self.ranks
        first = self.rank * own
        return [(part * packed + first, part * packed + first + own) for part in range(self.parts)]


@dataclass(frozen=True)
class Checkpoint:
    """Where the values of a module's fake parameters are, by the module's own names."""

    stored: Mapping[str, Stored]
    shares: Mapping[str, Share] = field(default_factory=dict)
    """Of which a parameter is a part only."""

    def has(self, name: str) -> bool:
        return name in self.stored

    def renamed(self, prefix: str) -> Checkpoint:
        """For a module that holds this one under `prefix`."""
        return Checkpoint({prefix + name: stored for name, stored in self.stored.items()})

    def pieces(self, name: str, dtype: torch.dtype) -> Iterator[torch.Tensor]:
        """The tensor's rows in order, in `dtype`, a few at a time; each is gone with the next.

        ModelError for a number that is not finite, in the shard or in `dtype`.
        """
        stored, share = self.stored[name], self.shares.get(name)
        kind = READ_DTYPES[stored.dtype]
        count = stored.shape[0] if stored.shape else 1
        wanted = [(0, count)] if share is None else share.rows(count)
        spans = [span for rows in wanted for span in _spans(rows, stored.shape, kind.itemsize)]
        most = max((stop - start for start, stop in spans), default=0)
        memory = torch.empty((most, *stored.shape[1:]), dtype=kind)
        row_bytes = torch.Size(stored.shape[1:]).numel() * kind.itemsize
        with stored.path.open("rb", buffering=0) as file:
            for start, stop in spans:
                file.seek(stored.offset + start * row_bytes)
                piece = memory[: stop - start]
                _read(file, piece, stored)
                cast = piece.to(dtype)
                _require_finite(stored, start, piece, cast)
                yield share.of(cast) if share is not None and share.dim else cast


def _spans(
    rows: tuple[int, int], shape: tuple[int, ...], itemsize: int
) -> Iterator[tuple[int, int]]:
    """Half-open ranges of `rows`, of about PIECE_BYTES each; a number is a row of its own."""
    first, end = rows
    step = max(1, PIECE_BYTES // max(1, torch.Size(shape[1:]).numel() * itemsize))
    for start in range(first, end, step):
        yield start, min(start + step, end)


def _read(file: FileIO, piece: torch.Tensor, stored: Stored) -> None:
    """Fill `piece`; a read may give less than asked for."""
    raw = piece.reshape(-1).view(torch.uint8).numpy().data
    while len(raw):
        count = file.readinto(raw)
        if not count:
            raise ModelError(f"{stored.path}: {stored.name}: expected more bytes, got none")
        raw = raw[count:]


def _require_finite(stored: Stored, row: int, piece: torch.Tensor, cast: torch.Tensor) -> None:
    # The extremes cost a fiftieth of a look at each element, and a NaN is both.
    if not cast.numel() or all(extreme.isfinite() for extreme in torch.aminmax(cast)):
        return
    at = tuple(int(i) for i in (~cast.isfinite()).nonzero()[0])
    index = [at[0] + row, *at[1:]] if stored.shape else ""
    holds = str(cast.dtype).removeprefix("torch.")
    raise ModelError(
        f"{stored.path}: {stored.name}{index}: expected a finite number in {holds}, "
        f"got {float(piece[at]):g}"
    )
