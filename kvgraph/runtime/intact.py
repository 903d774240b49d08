"""Artifacts that were found intact: no file is hashed again while none has changed.

    $XDG_CACHE_HOME/kvgraph/intact/<hash of the artifact's path>.json       (default: ~/.cache)

A stamp holds what the file system says of every file, read before the files are hashed: a change
while they are hashed, or later, makes a difference. The change time is part of it, so a file whose
modification time was put back is hashed. Two changes within a tick of the clock look like one, so
there is no stamp of files that changed just now (git's rule for its index). A stamp that is lost
costs one check.
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
"""How long no file has changed: the coarsest clock of a file system (FAT) ticks every 2 s."""


def require_intact(folder: Path, manifest: Manifest, *, again: bool) -> None:
    """ArtifactError as of `verify_files`; hashes nothing that was found intact, unless `again`."""
    stamp, path = _stamp(folder, manifest), _path(folder)
    if not again and stamp is not None and path is not None and _read(path) == stamp:
        return
    verify_files(folder, manifest.files)
    if stamp is not None and path is not None:
        _write(path, stamp)


def _stamp(folder: Path, manifest: Manifest) -> Stamp | None:
    """Of the files as they are; None where one is missing, outside, or changed just now."""
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
    """Where the artifact's stamp is; None for a user without a home."""
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
    with suppress(OSError):  # a folder that is not ours to write: the next start hashes again
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with replacing(path) as file:
            file.write(to_json(stamp))
