"""Where a checkpoint's tensors are: from the headers of its safetensors, or from their index alone.

Knows no framework: what is planned on a deployment machine is read here.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from kvgraph.contract.files import inside, open_regular
from kvgraph.contract.safetensors import read_layout
from kvgraph.errors import ModelError

WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"
INDEXES = (INDEX, "pytorch_model.bin.index.json")
"""Files that name others; transformers reads the second where there are no safetensors."""
PICKLED = "pytorch_model.bin"


@dataclass(frozen=True)
class Stored:
    """One tensor of a shard: its elements start at byte `offset` of the file."""

    path: Path
    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int


@dataclass(frozen=True)
class Index:
    """What an index says of a checkpoint: the shard of each tensor, and the bytes of all."""

    shards: dict[str, str]
    total_size: int | None


def stored_tensors(folder: Path) -> dict[str, Stored]:
    """Every tensor of the checkpoint in `folder`; empty where it has no safetensors.

    Headers only. ModelError for a shard that is missing, truncated or damaged.
    """
    paths = shard_paths(folder)
    return {stored.name: stored for path in paths for stored in _read_header(path)}


def shard_paths(folder: Path) -> list[Path]:
    """The files that hold a checkpoint's safetensors, whether they are there or not."""
    if (folder / WHOLE).is_file():
        return [folder / WHOLE]
    index = read_index(folder)
    return [folder / name for name in sorted(set(index.shards.values()))] if index else []


def require_known_names(folder: Path) -> None:
    """ModelError where the only weights in `folder` are safetensors that nothing names, such as
    AutoGPTQ's `gptq_model-4bit-128g.safetensors`."""
    if any((folder / name).is_file() for name in (WHOLE, PICKLED, *INDEXES)):
        return
    found = sorted(path.name for path in folder.glob("*.safetensors") if path.is_file())
    if found:
        others = f" and {len(found) - 1} more" if found[1:] else ""
        step = f"rename it to {WHOLE}"
        if others:
            step = f"rename the one with all weights to {WHOLE}, or add {INDEX}, which names them"
        raise ModelError(
            f"{folder}: expected weights in {WHOLE} or {INDEX}, got {found[0]}{others}; {step}"
        )


def read_index(folder: Path, name: str = INDEX) -> Index | None:
    """The index `name`; None where there is none. ModelError for a damaged one, or one that names
    a file outside the folder."""
    path = folder / name
    if not path.is_file():
        return None
    try:
        with open_regular(path) as file:
            data = json.loads(file.read())
        shards = {str(tensor): str(shard) for tensor, shard in data["weight_map"].items()}
        total = (data.get("metadata") or {}).get("total_size")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ModelError(
            f"{folder}: cannot read the weights: {name}: expected a weight_map, got a damaged file "
            f"({error})"
        ) from error
    for shard in sorted(set(shards.values())):
        if not _is_of(folder, shard):
            raise ModelError(
                f"{path}: expected shards inside the folder, got {shard!r}, which leads out of it"
            )
    return Index(shards, total if type(total) is int else None)


def _is_of(folder: Path, name: str) -> bool:
    """Whether a file is the checkpoint's: in its folder, or in the hub's cache of which that is a
    snapshot, whose files are links into `blobs`."""
    if inside(folder, name) is not None:
        return True
    plain = len(PurePosixPath(name).parts) == 1 and name not in ("", "..")
    own, target = folder.resolve(), (folder / name).resolve() if plain else folder
    return own.parent.name == "snapshots" and target.parent == own.parent.parent / "blobs"


def _read_header(path: Path) -> list[Stored]:
    from safetensors import SafetensorError, safe_open

    try:
        open_regular(path).close()  # a pipe would be waited for
        with safe_open(path, framework="numpy"):
            pass  # the header is sound, and the file as long as it says
        layout = read_layout(path)
    except (SafetensorError, OSError) as error:
        why = str(error).splitlines()[0]
        raise ModelError(f"{path.parent}: cannot read the weights: {path.name}: {why}") from error
    return [Stored(path, name, at.dtype, at.shape, at.offset) for name, at in layout.items()]
