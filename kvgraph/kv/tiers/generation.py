"""The files of a disk store: of the folder's newest generation; a damaged one is abandoned."""

from __future__ import annotations

import logging
import re
import shutil
import sqlite3
from contextlib import suppress
from pathlib import Path

from kvgraph.kv.tiers.index import DamagedIndexError, Index
from kvgraph.kv.tiers.owners import Owner
from kvgraph.kv.tiers.slabs import Slabs

FORMAT = "kvgraph-1"
"""Raised when anything in the folder changes its meaning."""

INDEX = "index.sqlite"

log = logging.getLogger("kvgraph.tiers")


class Generation:
    """Slabs, index and this process's lock, in one folder.

    The constructor and the index's calls raise DamagedIndexError, OSError or sqlite3.Error.
    """

    def __init__(self, folder: Path, fingerprint: bytes) -> None:
        self.folder = folder
        self.slabs = Slabs(folder)
        self.owner = Owner(folder)
        try:
            self.index = Index(folder / INDEX, fingerprint, self.slabs.free)
            self.bury_the_dead()
        except BaseException:
            self.close()
            raise

    def bury_the_dead(self) -> None:
        """Free what processes claim that are gone."""
        alive = self.owner.is_alive
        self.index.release([token for token in self.index.owners() if not alive(token)])
        self.owner.bury()

    def close(self) -> None:
        self.owner.close()
        self.slabs.close()
        if hasattr(self, "index"):
            with suppress(sqlite3.Error):
                self.index.close()


def open_newest(folder: Path, fingerprint: bytes) -> Generation:
    """The newest generation that is whole; a new one if none is."""
    while True:
        found = generations(folder)
        number = found[-1] if found else 1
        path = folder / f"{FORMAT}.{number}"
        try:
            path.mkdir(exist_ok=True)
            opened = Generation(path, fingerprint)
        except DamagedIndexError as error:
            log.warning("%s: the index is damaged (%s); the tier starts anew", path, error)
            (folder / f"{FORMAT}.{number + 1}").mkdir(exist_ok=True)
            shutil.rmtree(path, ignore_errors=True)
            continue
        for old in found[:-1]:
            shutil.rmtree(folder / f"{FORMAT}.{old}", ignore_errors=True)
        return opened


def generations(folder: Path) -> list[int]:
    """Numbers of the generations, ascending. Raises OSError."""
    names = [re.fullmatch(rf"{FORMAT}\.([1-9]\d{{0,17}})", path.name) for path in folder.iterdir()]
    return sorted(int(match[1]) for match in names if match)


def other_versions(folder: Path) -> list[Path]:
    """Stores of other formats in the folder: left alone."""
    own = re.compile(rf"{FORMAT}\.\d+")
    stores = sorted(folder.glob("kvgraph-[0-9]*.[0-9]*"))
    return [path for path in stores if not own.fullmatch(path.name)]
