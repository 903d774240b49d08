"""Names of a checkpoint's files, and its tensors by the headers of safetensors or an index only.

This module imports no framework, because plans are made on deployment machines too.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Container, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from kvgraph.contract.files import inside, kind_of, open_regular, resolved
from kvgraph.contract.safetensors import read_layout
from kvgraph.errors import KVGraphError, ModelError, UnsupportedError
from kvgraph.signal_handlers import ignoring, reraise_if_signalled

CONFIG = "config.json"
WHOLE, INDEX = "model.safetensors", "model.safetensors.index.json"
INDEXES = (INDEX, "pytorch_model.bin.index.json")
"""Files with an index of shards; transformers reads the second if there are no safetensors."""
PICKLED = "pytorch_model.bin"

POINTER = b"version https://git-lfs.github.com/spec/"


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a shard. Its elements start at byte `offset` of the file `path`."""

    path: Path
    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int


@dataclass(frozen=True)
class Index:
    """The content of an index file: the shard of each tensor, and the bytes of all tensors (None:
    not given)."""

    shards: dict[str, str]
    total_size: int | None


def stored_tensors(folder: Path, wanted: Container[str] = ()) -> dict[str, StoredTensor]:
    """All tensors of the checkpoint in `folder` by name; empty if it has no safetensors.

    `wanted`: names that a shard must have if the index has them.

    Only headers are read, and a tensor may be in another shard than the index says. Of several
    shards with one tensor the last one counts, as in transformers, if the index names it too.
    ModelError: a shard is missing, truncated or damaged, several shards have the same tensor, or
    none has a wanted one.
    """
    found: dict[str, StoredTensor] = {}
    earlier: dict[str, Path] = {}
    for path in shard_paths(folder):
        for stored in _read_header(path):
            if stored.name in found:
                earlier[stored.name] = found[stored.name].path
            found[stored.name] = stored
    for name, path in earlier.items():
        last = found[name].path
        if last != folder / shards_of(folder).get(name, ""):
            raise ModelError(
                f"{folder}: {name}: expected one shard with this tensor, got {path.name} and "
                f"{last.name}; download the shards of one checkpoint"
            )
    for name in shards_of(folder) if wanted else ():
        if name not in found and name in wanted:
            raise misplaced(folder, name)
    return found


def shards_of(folder: Path) -> dict[str, str]:
    """The shard of each tensor by the index of safetensors; empty if the weights are one file."""
    index = None if (folder / WHOLE).is_file() else read_index(folder)
    return index.shards if index else {}


@contextmanager
def indexed(folder: Path) -> Iterator[None]:
    """Replace an error by one about a tensor that the index names and no shard has, if there is
    one.

    Without an error such a tensor passes: the model has no place for it. An UnsupportedError stays
    unless its text is about another tensor of the same layer.
    """
    try:
        yield
    except (ModelError, UnsupportedError) as error:
        stored = stored_tensors(folder)
        absent = sorted(name for name in shards_of(folder) if name not in stored)
        if isinstance(error, UnsupportedError):
            absent = [name for name in absent if f"{name.rpartition('.')[0]}." in str(error)]
        if absent:
            said = (name for name in absent if name in str(error))
            raise misplaced(folder, next(said, absent[0])) from error
        raise


def misplaced(folder: Path, name: str) -> ModelError:
    """The error for a tensor that no shard of the index has."""
    got = _other_with(folder, name)
    return ModelError(
        f"{folder / INDEX}: weight_map: expected {name} in {shards_of(folder)[name]}, got it in "
        f"{got}; download the index and the shards of one checkpoint"
    )


def _other_with(folder: Path, name: str) -> str:
    """Text for an error message: the file that has a tensor which no shard of the index has."""
    for path in sorted({*folder.glob("*.safetensors")} - {*shard_paths(folder)}):
        with suppress(KVGraphError):
            if any(stored.name == name for stored in _read_header(path)):
                return f"{path.name}, which the index does not name"
    return "no file of the folder"


def shard_paths(folder: Path) -> list[Path]:
    """Paths of a checkpoint's safetensors files; those that an index names may be missing."""
    if (folder / WHOLE).is_file():
        return [folder / WHOLE]
    index = read_index(folder)
    return [folder / name for name in sorted(set(index.shards.values()))] if index else []


def require_fetched(paths: Iterable[Path]) -> None:
    """Raise ModelError if one of the files is a git-lfs pointer, a link to nothing, or no file,
    such as a folder or a pipe.

    Files that are missing pass.
    """
    for path in paths:
        if os.path.islink(path) and not os.path.exists(path):
            how = "leads in a circle" if _is_circle(path) else "is gone"
            raise ModelError(
                f"{path}: expected the file, got a link to {path.readlink()}, which {how}; "
                "download it again"
            )
        if os.path.exists(path) and not os.path.isfile(path):
            raise ModelError(
                f"{path}: expected a file, got {kind_of(path.resolve())}; remove it, or put the "
                "file in its place"
            )
        if _is_pointer(path):
            raise ModelError(
                f"{path}: expected the file, got a pointer of git-lfs to it; fetch it with "
                "git lfs pull"
            )


def _is_circle(link: Path) -> bool:
    try:
        os.stat(link)
    except OSError as error:
        reraise_if_signalled(error)
        return error.errno == errno.ELOOP
    return False


def _is_pointer(path: Path) -> bool:
    with ignoring(OSError, ValueError), open_regular(path) as file:  # ValueError: a NUL
        return file.read(len(POINTER)) == POINTER
    return False


def read_index(folder: Path, name: str = INDEX) -> Index | None:
    """The index file `name` of `folder`; None if it is missing.

    ModelError: it is damaged, or names a file outside the folder.
    """
    path = folder / name
    if not path.is_file():
        return None
    try:
        with open_regular(path) as file:
            data = json.loads(file.read())
        shards: dict[str, str] = dict(data["weight_map"].items())
        total = (data.get("metadata") or {}).get("total_size")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        reraise_if_signalled(error)
        raise ModelError(
            f"{folder}: cannot read the weights: {name}: expected a weight_map, got a damaged file "
            f"({error})"
        ) from error
    odd = [shard for shard in shards.values() if not isinstance(shard, str)]
    if odd or not shards:
        got = f"{type(odd[0]).__name__} {odd[0]!r:.100}" if odd else "none"
        raise ModelError(f"{path}: weight_map: expected the name of each tensor's file, got {got}")
    for shard in sorted(set(shards.values())):
        if not _is_of(folder, shard):
            raise ModelError(
                f"{path}: expected shards inside the folder, got {shard!r}, which leads out of it"
            )
    return Index(shards, total if type(total) is int else None)


def _is_of(folder: Path, name: str) -> bool:
    """Whether `name` is a file of the checkpoint.

    It lies in its folder or, if the folder is a snapshot in the hub's cache, links to a file in
    that cache's `blobs`.
    """
    if inside(folder, name) is not None:
        return True
    plain = len(PurePosixPath(name).parts) == 1 and name not in ("", "..")
    own, target = resolved(folder), resolved(folder / name) if plain else folder
    return own.parent.name == "snapshots" and target.parent == own.parent.parent / "blobs"


def _read_header(path: Path) -> list[StoredTensor]:
    from safetensors import SafetensorError, safe_open

    try:
        open_regular(path).close()  # refuses a pipe, on which opening would block
        with safe_open(path, framework="numpy"):
            pass  # it checks the header, and the file's length
        layout = read_layout(path)
    except (SafetensorError, OSError) as error:
        reraise_if_signalled(error)
        why = str(error).splitlines()[0]
        raise ModelError(
            f"{path.parent}: cannot read the weights: {path.name}: {why}; copy or download the "
            "file again"
        ) from error
    return [StoredTensor(path, name, at.dtype, at.shape, at.offset) for name, at in layout.items()]
