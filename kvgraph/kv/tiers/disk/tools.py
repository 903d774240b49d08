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
from kvgraph.kv.tiers.disk.reading import ModelPages, pages_by_model
from kvgraph.signal_handlers import reraise_if_signalled


class Progress(NamedTuple):
    checked: int
    damaged: int


def describe(folder: Path) -> tuple[list[ModelPages], list[Path]]:
    """Pages of each model, the last used model first, and stores of other versions of kvgraph."""
    with _telling(folder):
        return pages_by_model(_newest(folder)), other_versions(folder)


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
    with _telling(folder):
        _newest(folder)
        open_newest(folder, b"", lambda _: None).close()
    for model in describe(folder)[0]:
        with _opened(folder, model.fingerprint) as files:
            removed += files.index.clear()
    return removed


@contextmanager
def _opened(folder: Path, fingerprint: bytes) -> Iterator[Generation]:
    with _telling(folder):
        files = Generation(_newest(folder), fingerprint)
        try:
            yield files
        finally:
            files.close()


def _newest(folder: Path) -> Path:
    """Path of the newest generation. StoreError if there is none with an index."""
    if not folder.is_dir():
        got = "a file" if folder.exists() else "nothing there"
        raise StoreError(f"{folder}: expected the folder of a disk tier, got {got}")
    found = generations(folder)
    path = folder / f"{FORMAT}.{found[-1] if found else 0}"
    if not (path / INDEX).exists():
        raise StoreError(f"{folder}: expected the folder of a disk tier, got one without pages")
    return path


@contextmanager
def _telling(folder: Path) -> Iterator[None]:
    """Raise StoreError for what fails in `folder`."""
    try:
        yield
    except DamagedError as error:
        raise StoreError(
            f"{folder}: expected a whole index, got a damaged one ({error}); the next engine that "
            f"opens the folder starts again, and so does kvgraph cache clear"
        ) from error
    except OSError as error:
        reraise_if_signalled(error)
        raise StoreError(
            f"{folder}: expected a folder that can be read and written, "
            f"got {error.strerror or str(error)!r}; give a copy of it in another place"
        ) from error
    except sqlite3.Error as error:
        raise StoreError(f"{folder}: expected an index to read, got: {error}") from error
