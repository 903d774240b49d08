"""Remembers artifacts that were found intact, so that unchanged files are not hashed again.

    $XDG_CACHE_HOME/kvgraph/intact/<hash of the artifact's path>.json       (default: ~/.cache)

    $XDG_CACHE_HOME/kvgraph/intact/<the same>.rank1.json                  the files of rank 1 only

A stamp holds size, times, inode and expected hashes of every file, read before the files are
hashed: a change during the hashing, or later, makes the stamp differ. It includes the change time,
so a file whose modification time was reset is hashed. Two changes within one tick of the clock look
like one, so files that changed just now get no stamp (git's rule for its index). A lost stamp costs
one check.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TypeAlias

from kvgraph.contract.files import inside, open_regular, replacing, resolved
from kvgraph.contract.hashes import FileEntry, verify_files
from kvgraph.contract.manifest import Manifest
from kvgraph.contract.plain import to_json, to_plain
from kvgraph.runtime.folder import files_of_rank
from kvgraph.signal_handlers import ignoring, reraise_if_signalled

Stamp: TypeAlias = dict[str, object]

SETTLED_SECONDS = 2
"""Least age of a file's last change: the coarsest file system clock (FAT) ticks every 2 s."""


def require_intact(
    folder: Path, manifest: Manifest, *, again: bool, rank: int | None = None
) -> None:
    """Raise ArtifactError as `verify_files` does. Unless `again`, skip files with a valid stamp.

    `rank`: check only files that this rank reads; None: all.
    """
    files = manifest.files if rank is None else files_of_rank(manifest.files, rank)
    stamp, paths = _stamp(folder, files), _paths(folder, rank)
    if stamp is not None and not again and any(_covers(_read(path), stamp) for path in paths):
        return
    verify_files(folder, files)
    if stamp is not None and paths:
        _write(paths[0], stamp)


def _covers(known: object, stamp: Stamp) -> bool:
    """Whether a stamp that was read has the same values for all files of `stamp`."""
    return isinstance(known, dict) and stamp.items() <= known.items()


def _stamp(folder: Path, expected: Mapping[str, FileEntry]) -> Stamp | None:
    """Stamp of the files as they are; None if one is missing, outside, or changed just now."""
    settled = time.time_ns() - SETTLED_SECONDS * 10**9
    stamp: Stamp = {}
    for name, entry in expected.items():
        path = inside(folder, name)
        if path is None:
            return None
        try:
            stat = path.stat()
        except OSError as error:
            reraise_if_signalled(error)
            return None
        if max(stat.st_mtime_ns, stat.st_ctime_ns) > settled:
            return None
        hashes = hashlib.sha256(to_json(to_plain(entry))).hexdigest()
        stamp[name] = [stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino, hashes]
    return stamp


def _paths(folder: Path, rank: int | None) -> list[Path]:
    """Paths of stamps that may have all files of `rank`, its own first; none without a home."""
    given = os.environ.get("XDG_CACHE_HOME", "")
    try:
        cache = Path(given) if os.path.isabs(given) else Path.home() / ".cache"
    except RuntimeError:
        return []
    key = hashlib.sha256(os.fsencode(resolved(folder))).hexdigest()[:32]
    names = [f"{key}.json"] if rank is None else [f"{key}.rank{rank}.json", f"{key}.json"]
    return [cache / "kvgraph" / "intact" / name for name in names]


def _read(path: Path) -> object:
    try:
        with open_regular(path) as file:
            stamp: object = json.loads(file.read())
    except (OSError, ValueError, RecursionError) as error:
        reraise_if_signalled(error)
        return None
    return stamp


def _write(path: Path, stamp: Stamp) -> None:
    with ignoring(OSError):  # not writable for this user: the next start hashes again
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with replacing(path) as file:
            file.write(to_json(stamp))
