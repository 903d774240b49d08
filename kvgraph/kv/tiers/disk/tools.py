"""Functions of the command line on a disk tier's folder, which engines may use at the same time."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from kvgraph.errors import StoreError
from kvgraph.kv.tiers.checksum import checksum
from kvgraph.kv.tiers.disk.folder import DamagedError
from kvgraph.kv.tiers.disk.generation import (
    FORMAT,
    Generation,
    generations,
    open_newest,
    other_versions,
)
from kvgraph.kv.tiers.disk.index import INDEX


class ModelPages(NamedTuple):
    """Pages of one model and layout in the folder; `last_used` in ns since 1970."""

    fingerprint: bytes
    pages: int
    nbytes: int
    last_used: int


class Progress(NamedTuple):
    checked: int
    damaged: int


def describe(folder: Path) -> tuple[list[ModelPages], list[Path]]:
    """Pages of each model, the last used model first, and stores of other versions of kvgraph."""
    with _opened(folder, b"") as files:
        found = [ModelPages(*row) for row in files.index.models()]
    return found, other_versions(folder)


def verify(folder: Path) -> Iterator[Progress]:
    """Check every page, one by one, and remove the damaged ones."""
    checked = damaged = 0
    for model in describe(folder)[0]:
        with _opened(folder, model.fingerprint) as files:
            for key in files.index.all_keys():
                damaged += not _check(files, model.fingerprint, key)
                checked += 1
                yield Progress(checked, damaged)


def _check(files: Generation, fingerprint: bytes, key: bytes) -> bool:
    held = files.index.find(key)
    if held is None:
        return True  # evicted meanwhile
    out = memoryview(bytearray(held.size))
    if files.slabs.read(held.at, out) and checksum(fingerprint, key, [out]) == held.sum:
        return True
    return not files.index.remove(key, held)


def clear(folder: Path) -> int:
    """Remove the pages of all models and return their number. A damaged index is removed too, and
    its pages do not count."""
    removed = 0
    with _opened(folder, b"", starts_again=True) as files:
        models = [ModelPages(*row) for row in files.index.models()]
    for model in models:
        with _opened(folder, model.fingerprint) as files:
            removed += files.index.clear()
    return removed


@contextmanager
def _opened(
    folder: Path, fingerprint: bytes, *, starts_again: bool = False
) -> Iterator[Generation]:
    """Open the newest generation. `starts_again`: replace a damaged one, as an engine does."""
    if not folder.is_dir():
        got = "a file" if folder.exists() else "nothing there"
        raise StoreError(f"{folder}: expected the folder of a disk tier, got {got}")
    found = generations(folder)
    if not (found and (folder / f"{FORMAT}.{found[-1]}" / INDEX).exists()):
        raise StoreError(f"{folder}: expected the folder of a disk tier, got one without pages")
    try:
        if starts_again:
            files = open_newest(folder, fingerprint, lambda _: None)
        else:
            files = Generation(folder / f"{FORMAT}.{found[-1]}", fingerprint)
        try:
            yield files
        finally:
            files.close()
    except DamagedError as error:
        raise StoreError(
            f"{folder}: expected a whole index, got a damaged one ({error}); the next engine that "
            f"opens the folder starts again, and so does kvgraph cache clear"
        ) from error
    except OSError as error:
        raise StoreError(
            f"{folder}: expected a folder that can be read and written, "
            f"got {error.strerror or str(error)!r}; give a copy of it in another place"
        ) from error
    except sqlite3.Error as error:
        raise StoreError(f"{folder}: expected an index to read, got: {error}") from error
