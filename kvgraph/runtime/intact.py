"""Remembers artifacts that were found intact, so that unchanged files are not hashed again.

    $XDG_CACHE_HOME/kvgraph/intact/<hash of the artifact's path>.json       (default: ~/.cache)

A stamp holds size, times and inode of every file, read before the files are hashed: a change during
the hashing, or later, makes the stamp differ. It includes the change time, so a file whose
modification time was reset is hashed. Two changes within one tick of the clock look like one, so
files that changed just now get no stamp (git's rule for its index). A lost stamp costs one check.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import TypeAlias

from kvgraph.contract.files import inside, open_regular, replacing
from kvgraph.contract.hashes import verify_files
from kvgraph.contract.manifest import Manifest
from kvgraph.contract.plain import to_json, to_plain

Stamp: TypeAlias = dict[str, object]

SETTLED_SECONDS = 2
"""Least age of a file's last change: the coarsest file system clock (FAT) ticks every 2 s."""


def require_intact(folder: Path, manifest: Manifest, *, again: bool) -> None:
    """Raise ArtifactError as `verify_files` does. Unless `again`, skip files with a valid stamp."""
    stamp, path = _stamp(folder, manifest), _path(folder)
    if not again and stamp is not None and path is not None and _read(path) == stamp:
        return
    verify_files(folder, manifest.files)
    if stamp is not None and path is not None:
        _write(path, stamp)


def _stamp(folder: Path, manifest: Manifest) -> Stamp | None:
    """Stamp of the files as they are; None if one is missing, outside, or changed just now."""
    settled = time.time_ns() - SETTLED_SECONDS * 10**9
    files = {}
    for name in manifest.files:
        path = inside(folder, name)
        if path is None:
            return None
        try:
            stat = path.stat()
        except OSError:
            return None
        if max(stat.st_mtime_ns, stat.st_ctime_ns) > settled:
            return None
        files[name] = [stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino]
    hashes = hashlib.sha256(to_json(to_plain(manifest.files))).hexdigest()
    return {"hashes": hashes, "files": files}


def _path(folder: Path) -> Path | None:
    """Path of the artifact's stamp; None if the user has no home folder."""
    given = os.environ.get("XDG_CACHE_HOME", "")
    try:
        cache = Path(given) if os.path.isabs(given) else Path.home() / ".cache"
    except RuntimeError:
        return None
    key = hashlib.sha256(os.fsencode(folder.resolve())).hexdigest()
    return cache / "kvgraph" / "intact" / f"{key[:32]}.json"


def _read(path: Path) -> object:
    try:
        with open_regular(path) as file:
            stamp: object = json.loads(file.read())
    except (OSError, ValueError, RecursionError):
        return None
    return stamp


def _write(path: Path, stamp: Stamp) -> None:
    with suppress(OSError):  # not writable for this user: the next start hashes again
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with replacing(path) as file:
            file.write(to_json(stamp))
