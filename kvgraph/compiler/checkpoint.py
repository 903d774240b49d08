"""A checkpoint's safetensors: names and shapes first, values in pieces, never all at once.

Decision: the library checks a shard's header, and plain reads get the values: its torch tensors
are views of a private mapping of the whole shard, which a machine with less memory refuses.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from io import FileIO
from pathlib import Path

import torch

from kvgraph.contract.safetensors import read_layout
from kvgraph.errors import ModelError

WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"
PIECE_BYTES = 16 << 20

READ_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
}


@dataclass(frozen=True)
class Stored:
    """One tensor of a shard: its elements start at byte `offset` of the file."""

    path: Path
    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int


@dataclass(frozen=True)
class Checkpoint:
    """Where the values of a module's fake parameters are, by the module's own names."""

    stored: Mapping[str, Stored]

    def has(self, name: str) -> bool:
        return name in self.stored

    def renamed(self, prefix: str) -> Checkpoint:
        """For a module that holds this one under `prefix`."""
        return Checkpoint({prefix + name: stored for name, stored in self.stored.items()})

    def pieces(self, name: str, dtype: torch.dtype) -> Iterator[torch.Tensor]:
        """The tensor's rows in order, in `dtype`, a few at a time; each is gone with the next.

        ModelError for a number that is not finite, in the shard or in `dtype`.
        """
        stored = self.stored[name]
        kind = READ_DTYPES[stored.dtype]
        spans = list(_spans(stored.shape, kind.itemsize))
        rows = max((stop - start for start, stop in spans), default=0)
        memory = torch.empty((rows, *stored.shape[1:]), dtype=kind)
        with stored.path.open("rb", buffering=0) as file:
            file.seek(stored.offset)
            for start, stop in spans:
                piece = memory[: stop - start]
                _read(file, piece, stored)
                cast = piece.to(dtype)
                _require_finite(stored, start, piece, cast)
                yield cast


def stored_tensors(folder: Path) -> dict[str, Stored]:
    """Every tensor of the checkpoint in `folder`; empty where it has no safetensors.

    Headers only. ModelError for a shard that is missing, truncated or damaged.
    """
    if (folder / WHOLE).is_file():
        paths = [folder / WHOLE]
    elif (folder / INDEX).is_file():
        paths = [folder / shard for shard in _shards(folder / INDEX)]
    else:
        return {}
    return {stored.name: stored for path in paths for stored in _read_header(path)}


def _shards(index: Path) -> list[str]:
    try:
        shards = json.loads(index.read_text())["weight_map"].values()
        return sorted({str(shard) for shard in shards})
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(
            f"{index.parent}: cannot read the weights: {index.name}: expected a weight_map, "
            f"got a damaged file ({error})"
        ) from error


def _read_header(path: Path) -> list[Stored]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="numpy"):
            pass  # the header is sound, and the file as long as it says
        layout = read_layout(path)
    except (SafetensorError, OSError) as error:
        why = str(error).splitlines()[0]
        raise ModelError(f"{path.parent}: cannot read the weights: {path.name}: {why}") from error
    return [Stored(path, name, at.dtype, at.shape, at.offset) for name, at in layout.items()]


def _spans(shape: tuple[int, ...], itemsize: int) -> Iterator[tuple[int, int]]:
    """Half-open ranges of rows of about PIECE_BYTES; a number is a row of its own."""
    rows, *rest = shape or (1,)
    step = max(1, PIECE_BYTES // max(1, torch.Size(rest).numel() * itemsize))
    for start in range(0, rows, step):
        yield start, min(start + step, rows)


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
