"""Places of the tensors in a safetensors file: u64 header length, JSON header, data."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

from kvgraph.contract.files import open_regular, reading
from kvgraph.contract.plain import JsonObject, in_short
from kvgraph.errors import ArtifactError
from kvgraph.signal_handlers import reraise_if_signalled


@dataclass(frozen=True, slots=True)
class TensorAt:
    """A tensor in a file: its elements are `nbytes` bytes from byte `offset` of the file."""

    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


def read_layout(path: Path) -> dict[str, TensorAt]:
    """Every tensor by name, in the header's order; the data is neither read nor checked.

    ArtifactError for a header that is damaged, or that points beyond the file.
    """
    try:
        with reading(path, ArtifactError), open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            if length > size - 8:
                raise ValueError(f"a header of {length} bytes in a file of {size}")
            header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        return {name: _tensor(of, 8 + length, size) for name, of in header.items()}
    except ArtifactError:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        reraise_if_signalled(error)
        raise ArtifactError(
            f"{path}: expected safetensors, got a damaged header ({in_short(error)})"
        ) from error


def _tensor(of: JsonObject, data: int, size: int) -> TensorAt:
    start, end = of["data_offsets"]
    if not 0 <= start <= end <= size - data:
        raise ValueError(f"bytes {start} to {end} of {size - data}")
    return TensorAt(of["dtype"], tuple(of["shape"]), data + start, end - start)
