"""Files of a disk store: the newest generation in the folder; a damaged one is abandoned."""

from __future__ import annotations

import errno
import logging
import os
import re
import sqlite3
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

from kvgraph.contract.files import kind_of
from kvgraph.kv.tiers.disk.folder import FOLDER, DamagedError, PrivateFolder
from kvgraph.kv.tiers.disk.index import INDEX, Index
from kvgraph.kv.tiers.disk.owners import OWNER, Owner
from kvgraph.kv.tiers.disk.slabs import SLAB, Slabs
from kvgraph.signal_handlers import ignoring

FORMAT = "kvgraph-1"
"""Format name; its number is raised when the meaning of anything in the folder, or the text of the
index's schema, changes."""

GENERATION = re.compile(rf"{FORMAT}\.([1-9]\d{{0,17}})")
OURS = re.compile(rf"{re.escape(INDEX)}(-journal|-wal|-shm)?|{SLAB.pattern}|{OWNER.pattern}")
"""Names of a generation's files; no other file is ever removed."""

ATTEMPTS = 3
"""Most generations that are tried: a disk that damages new ones too cannot be used."""

log = logging.getLogger("kvgraph.tiers")


class Generation:
    """Slabs, index and this process's lock, in one folder.

    The constructor and the index's calls raise DamagedError, OSError or sqlite3.Error. The
    constructor also raises StoreError for a folder that is a link, belongs to another user, or has
    no locks.
    """

    def __init__(self, folder: Path, fingerprint: bytes) -> None:
        self.path = folder
        self._folder = PrivateFolder(folder.parent, folder.name)
        self.slabs = Slabs(self._folder)
        try:
            self.owner = Owner(self._folder)
            self.index = Index(
                self._folder, fingerprint, self.slabs.free, self.owner.is_index_trusted
            )
            self.owner.trust_index()
            self.remove_dead_owners()
        except BaseException:
            self.close()
            raise

    def remove_dead_owners(self) -> None:
        """Free the slots that dead processes claimed."""
        alive = self.owner.is_alive
        self.index.release([token for token in self.index.owners() if not alive(token)])
        self.owner.remove()

    def status(self) -> os.stat_result:
        """Status of the opened folder, which identifies it even if its path was replaced."""
        return os.fstat(self._folder.fd)

    def close(self) -> None:
        with ExitStack() as parts:  # closed from the last one
            parts.callback(self._folder.close)
            if hasattr(self, "index"):
                parts.enter_context(suppress(sqlite3.Error))
                parts.callback(self.index.close)
            parts.callback(self.slabs.close)
            if hasattr(self, "owner"):
                parts.callback(self.owner.close)


def open_newest(
    folder: Path,
    fingerprint: bytes,
    prepare: Callable[[Generation], None],
    damaged: os.stat_result | None = None,
) -> Generation:
    """Open the newest undamaged generation, or a new one, and call `prepare` on it.

    `damaged`: status of a folder that was found damaged in use. Raises as `Generation` does, but
    OSError instead of DamagedError if `ATTEMPTS` generations are damaged.
    """
    for _ in range(ATTEMPTS):
        found = generations(folder)
        number = found[-1] if found else _first_free(folder)
        path = folder / f"{FORMAT}.{number}"
        try:
            if damaged is not None and found and os.path.samestat(path.lstat(), damaged):
                raise DamagedError("it failed in use")
            return _prepared(path, fingerprint, prepare, found[:-1])
        except DamagedError as error:
            log.warning("%s: the index is damaged (%s); the tier starts again", path, error)
            PrivateFolder(folder, f"{FORMAT}.{number + 1}").close()
            _remove(path)
    raise OSError(errno.EIO, "new files were damaged too")


def _prepared(
    path: Path,
    fingerprint: bytes,
    prepare: Callable[[Generation], None],
    before: Sequence[int],
) -> Generation:
    """Open a generation, call `prepare` on it, and remove those `before` it."""
    opened = Generation(path, fingerprint)
    try:
        prepare(opened)
        for old in before:
            _remove(path.with_name(f"{FORMAT}.{old}"))
    except BaseException:
        opened.close()
        raise
    return opened


def generations(folder: Path) -> list[int]:
    """Numbers of the generations in the folder, links included, ascending. Raises OSError."""
    numbers = _numbers(folder)
    kinds = ("a folder", "a link")
    return [n for n in numbers if kind_of(folder / f"{FORMAT}.{n}") in kinds]


def other_versions(folder: Path) -> list[Path]:
    """Paths of stores of other formats in the folder, which kvgraph does not change."""
    own = re.compile(rf"{FORMAT}\.\d+")
    stores = sorted(folder.glob("kvgraph-[0-9]*.[0-9]*"))
    return [path for path in stores if not own.fullmatch(path.name)]


def _numbers(folder: Path) -> list[int]:
    """Numbers of all names with a generation's form, ascending; empty if there is no folder yet."""
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return []
    return sorted(int(match[1]) for name in names if (match := GENERATION.fullmatch(name)))


def _first_free(folder: Path) -> int:
    return max(_numbers(folder), default=0) + 1


def _remove(path: Path) -> None:
    """Remove a generation's files, and its folder unless it has other files."""
    with ignoring(OSError):
        folder = os.open(path, FOLDER)
        try:
            for name in filter(OURS.fullmatch, os.listdir(folder)):
                with ignoring(OSError):
                    os.unlink(name, dir_fd=folder)
        finally:
            os.close(folder)
        path.rmdir()
