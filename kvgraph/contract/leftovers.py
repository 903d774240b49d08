"""Folders that a killed process leaves, and that a later one removes.

The live process holds a lock on the file `owner` in its folder. The system releases it if the
process is killed, on any machine and in any container. A folder with a locked one, or of another
user, is not touched. One without that file is removed only if it is empty and old: a process that
is killed as it makes or removes a folder leaves that.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from kvgraph.contract.plain import JsonObject
from kvgraph.errors import ArtifactError
from kvgraph.signal_handlers import ignoring, reraise_if_signalled

OWNER, MADE = "owner", "made"

NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)
"""Errors of file systems without locks (some mounts of Lustre, NFS and FUSE). Leftovers stay there,
because no owner is known dead."""

OLD_SECONDS = 3600.0
"""Age from which a folder is not one that a live process makes now."""

SCRATCH = {"kvgraph": "scratch"}
"""What `owner` says in a folder of `scratch`."""


@contextmanager
def making(folder: Path) -> Iterator[None]:
    """Make `folder` and its parents. If this scope raises, those that it made and that are empty
    are removed."""
    made: list[Path] = []
    try:
        for each in reversed([folder, *folder.parents]):
            if not each.is_dir():
                with suppress(FileExistsError):  # of another process; a file raises below
                    each.mkdir()
                    made.append(each)
        folder.mkdir(exist_ok=True)
        yield
    except BaseException:
        for each in reversed(made):
            with ignoring(OSError):
                each.rmdir()
        raise


@contextmanager
def owned(folder: Path, said: Mapping[str, str]) -> Iterator[None]:
    """Hold a lock on a new file `owner` in the empty `folder`, which has `said` as JSON.

    If the file cannot be written, the folder is removed."""
    path, owner = folder / OWNER, -1
    try:
        try:
            owner = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
            _lock(owner)
            os.write(owner, json.dumps(said).encode())
        except BaseException:
            with ignoring(OSError):  # without a file descriptor: there may be none
                path.unlink(missing_ok=True)
                folder.rmdir()
            raise
        yield
    finally:
        if owner >= 0:
            os.close(owner)


def _lock(owner: int) -> None:
    try:
        fcntl.flock(owner, fcntl.LOCK_EX)
    except OSError as error:
        reraise_if_signalled(error)
        if error.errno not in NO_LOCKS:
            raise


@contextmanager
def unowned(folder: Path) -> Iterator[JsonObject]:
    """Hold the lock that a dead process had on `folder`, and give what its `owner` says.

    OSError if the process is alive, or if there is no such file; ValueError if it is not JSON.
    """
    with _locked(folder) as owner:
        yield json.loads(os.read(owner, 1 << 16))


@contextmanager
def _locked(folder: Path) -> Iterator[int]:
    """Open and lock a dead process's `owner`. OSError as in `unowned`."""
    owner = os.open(folder / OWNER, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        fcntl.flock(owner, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield owner
    finally:
        os.close(owner)


def remove_if_empty(folder: Path) -> None:
    """Remove a folder of this user that is older than OLD_SECONDS, and holds nothing, or only an
    empty `owner` that no process has locked."""
    with ignoring(OSError):
        found = folder.lstat()
        is_old = time.time() - found.st_mtime > OLD_SECONDS
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or not is_old:
            return
        if os.listdir(folder) == [OWNER]:
            with _locked(folder) as owner:
                if os.fstat(owner).st_size:
                    return
                (folder / OWNER).unlink()
        folder.rmdir()  # fails if anything is in it


@contextmanager
def scratch(kind: str) -> Iterator[Path]:
    """A new folder in the temporary folder, removed at the end. `kind`: a word of its name.

    Folders of this kind that killed processes of this user left there are removed first.
    ArtifactError if no temporary folder can be written.
    """
    prefix = f"kvgraph-{kind}."
    try:
        parent = Path(tempfile.gettempdir())
    except FileNotFoundError as error:
        raise ArtifactError(
            f"TMPDIR: expected a temporary folder that can be written, got {error.strerror!r}; set "
            "TMPDIR to one"
        ) from error
    with ignoring(OSError):
        for left in parent.glob(f"{prefix}*"):
            _remove_unowned(left)
    folder = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
    try:
        with owned(folder, SCRATCH):
            (folder / MADE).mkdir()
            yield folder / MADE
    finally:
        _remove(folder)


def _remove_unowned(folder: Path) -> None:
    with ignoring(OSError, ValueError):
        if folder.is_symlink() or folder.stat().st_uid != os.geteuid():
            return
        with unowned(folder) as said:
            if said == SCRATCH:
                _remove(folder)
    remove_if_empty(folder)


def _remove(folder: Path) -> None:
    """Remove a folder of `scratch`; `owner` goes last, so that what cannot be removed now can be
    later."""
    shutil.rmtree(folder / MADE, ignore_errors=True)
    if not (folder / MADE).exists():
        shutil.rmtree(folder, ignore_errors=True)
