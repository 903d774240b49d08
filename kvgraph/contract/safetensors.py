"""Where each tensor of a safetensors file is: u64 header length, JSON header, data."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class TensorAt:
    """A tensor in a file: its elements are `nbytes` bytes from byte `offset` of the file."""

    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


def read_layout(path: Path) -> dict[str, TensorAt]:
    """Every tensor by name, in the header's order; the data is not read, nor checked."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    header.pop("__metadata__", None)
    data = 8 + length
    return {
        name: TensorAt(of["dtype"], tuple(of["shape"]), data + start, end - start)
        for name, of in header.items()
        for start, end in [of["data_offsets"]]
    }
