"""Make the output folder of a compile: in a staging folder next to its place, then moved whole.

    PARENT/.kvgraph-staging.<word>/owner      JSON: kvgraph's mark, and the name of the output
                                   made/      the folder that becomes the output
                                   replaced/  the old artifact, until it is removed; it is moved
                                              back only while made/ exists too

The live process holds a lock on `owner` (`contract/leftovers.py`). A staging folder without that
file, or with a locked one, is not touched, unless it is empty and old. Only files of artifacts and
of staging folders are removed.
"""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import stat
import tempfile
import warnings
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path, PurePosixPath

from kvgraph.contract.files import can_read, can_write, kind_of, naming, require_utf8
from kvgraph.contract.leftovers import MADE, OWNER, making, owned, remove_if_empty, unowned
from kvgraph.contract.manifest import MANIFEST_NAME, listed_names
from kvgraph.errors import ArtifactError, KVGraphError
from kvgraph.signal_handlers import ignoring, reraise_if_signalled

PREFIX = ".kvgraph-staging."
REPLACED = "replaced"
MARKER = {"kvgraph": "staging"}

NO_SYNC = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EACCES)
"""Errors of file systems without fsync, and of folders that cannot be read."""

AT_FDCWD, RENAME_EXCHANGE = -100, 2  # renameat2(2)

SHOWN = 3
"""Most file names that an error message lists."""


def require_free(out: Path, *, force: bool) -> frozenset[str]:
    """Names of the files that a compile to `out` replaces.

    ArtifactError, before anything is computed, if `out` cannot become an artifact, or if files
    would be lost. Without `force` any existing folder is refused; with it, a folder that holds
    more than the files of an artifact.
    """
    require_utf8(absolute(out), "libraries that write there")
    parent = _require_parent(out)
    try:
        os.rmdir(tempfile.mkdtemp(prefix=PREFIX, dir=parent))
    except OSError as error:  # such as in /proc
        reraise_if_signalled(error)
        raise ArtifactError(
            f"{out}: expected a folder that can be written, got {parent} ({error.strerror})"
        ) from error
    return _replaced_names(out, force=force)


def _replaced_names(out: Path, *, force: bool) -> frozenset[str]:
    """`require_free` of an `out` whose parent takes folders."""
    kind = kind_of(out)
    if kind is None:
        return frozenset()
    if kind == "a link":
        raise ArtifactError(
            f"{out}: expected a folder, got a link to {os.readlink(out)}; give that folder"
        )
    if not force:
        raise ArtifactError(f"{out}: expected no such folder yet, got one (kept); use --force")
    if kind == "a folder" and (why := _fixed(out)):
        raise ArtifactError(f"{out}: expected a folder that can be replaced, got {why} (kept)")
    if kind == "a folder" and not any(out.iterdir()):
        names = frozenset[str]()
    elif kind == "a folder" and (out / MANIFEST_NAME).exists():
        names = _listed(out)
    else:
        raise ArtifactError(
            f"{out}: expected an artifact or an empty folder to replace, got something else (kept)"
        )
    return names


def _fixed(out: Path) -> str | None:
    """Why the folder `out` cannot be replaced, as text; None if it can."""
    if os.path.ismount(out):  # Path.is_mount takes "." for one
        return "a mount point"
    if not can_write(out):
        return "one that cannot be written"
    return None if can_read(out) else "one that cannot be read"


def settle_leftovers(out: Path) -> None:
    """Clean up after killed compiles next to `out`: remove leftovers, or move an old artifact back.

    Call it before `require_free`, which then sees the final state. It does nothing if the parent
    folder cannot be read.
    """
    with ignoring(OSError, ValueError):
        for folder in sorted(absolute(out).parent.glob(f"{PREFIX}*")):
            _settle_leftover(folder)


@contextmanager
def staging(out: Path, *, force: bool) -> Iterator[Path]:
    """A folder next to `out` that becomes `out` on success and disappears on failure, with the
    parents of `out` that were made for it. Errors of kvgraph name `out` in its place.

    `require_free` runs again at the end, so files that appeared at `out` meanwhile are not lost. A
    killed process leaves the old artifact or the new one, and a hidden folder, which the next
    compile to the same place removes.
    """
    out = absolute(out)
    with ExitStack() as parents:
        try:
            parents.enter_context(making(out.parent))
            settle_leftovers(out)
            folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=out.parent))
        except OSError as error:
            reraise_if_signalled(error)
            raise ArtifactError(
                f"{out}: expected a folder at {out.parent} to make it in, got {error.strerror!r}"
            ) from error
        with _staged(out, folder, force=force) as made:
            yield made


@contextmanager
def _staged(out: Path, folder: Path, *, force: bool) -> Iterator[Path]:
    """`staging` in `folder`, which is new and empty."""
    made = folder / MADE
    with naming(out, str(folder)), owned(folder, MARKER | {"output": out.name}):
        try:
            _require_movable(out, folder)
            made.mkdir()
            yield made
            _follow_umask(made)
            _require_parent(out)
            _replace(out, folder, _replaced_names(out, force=force))
        except KVGraphError as error:
            for name in (str(made), os.path.realpath(made)):
                said = (a.replace(name, str(out)) if isinstance(a, str) else a for a in error.args)
                error.args = tuple(said)
            raise
        finally:
            _settle(folder, out)


def absolute(out: Path) -> Path:
    """`out` as an absolute path that ends with a name; "." and "x/.." are resolved.

    ArtifactError for a relative path in a working folder that was removed.
    """
    try:
        out = out.absolute()
    except FileNotFoundError as error:
        raise ArtifactError(
            f"{out}: expected a working folder to make it in, got one that was removed"
        ) from error
    return out.resolve() if out.name in ("", "..") else out


def _require_parent(out: Path) -> Path:
    """The nearest parent of `out` that exists. ArtifactError unless `out` can be made in it."""
    parent, name = absolute(out).parent, absolute(out).name
    missing = None  # a folder that ".." leads out of
    try:
        while (kind := kind_of(parent)) is None:
            missing = parent.parent if parent.name == ".." else missing
            parent = parent.parent
        kind_of(parent / name)
    except OSError as error:
        reraise_if_signalled(error)
        raise ArtifactError(f"{out}: expected a path to make, got {error.strerror!r}") from error
    if missing is not None:
        got = kind_of(missing) or "none"
        raise ArtifactError(f"{out}: expected a folder at {missing} before '..', got {got}")
    if not parent.is_dir():
        got = "a link that leads nowhere" if not parent.exists() else kind
        raise ArtifactError(f"{out}: expected a folder at {parent} to make it in, got {got}")
    if not can_write(parent):
        raise ArtifactError(f"{out}: expected a folder that can be written, got {parent}")
    return parent


def _listed(out: Path) -> frozenset[str]:
    """The files of the artifact in `out`. ArtifactError if the folder holds others."""
    try:
        names = listed_names(out)
    except ArtifactError as error:
        raise ArtifactError(
            f"{out}: expected an artifact or an empty folder to replace, got one whose "
            f"{MANIFEST_NAME} is of no artifact (kept): {error}"
        ) from error
    others = sorted(_others(out, names))
    if others:
        shown = ", ".join(others[:SHOWN]) + (", ..." if len(others) > SHOWN else "")
        raise ArtifactError(
            f"{out}: expected only files of its artifact to replace, got {len(others)} more "
            f"(kept): {shown}; move them out"
        )
    return names


def _others(folder: Path, names: Collection[str]) -> Iterator[str]:
    """Files and folders in `folder` other than the files `names` and their folders."""
    folders = _folders(names)
    for path, inner, files in os.walk(folder):
        where = Path(path).relative_to(folder)
        for name in list(inner):
            found = (where / name).as_posix()
            if found not in folders or (Path(path) / name).is_symlink():
                inner.remove(name)
                yield f"{found}/"
        yield from (f for name in files if (f := (where / name).as_posix()) not in names)


def _folders(names: Collection[str]) -> set[str]:
    parents = (parent.as_posix() for name in names for parent in PurePosixPath(name).parents)
    return {parent for parent in parents if parent != "."}


def _require_movable(out: Path, full: Path) -> None:
    """Raise ArtifactError if the file system cannot move the artifact `out`.

    It tries to move it to `full`, a folder that is not empty: that fails with another error.
    """
    try:
        out.rename(full)
    except OSError as error:
        reraise_if_signalled(error)
        if error.errno == errno.EXDEV and any(out.iterdir()):
            raise ArtifactError(
                f"{out}: expected a folder that can be replaced, got one that the file system "
                "cannot move, such as a folder of a container's image (kept); remove it first, or "
                "give another -o"
            ) from error


def _follow_umask(made: Path) -> None:
    """Give every file the read and write permissions of `made`: some libraries write files that
    only their user can read."""
    mode = made.stat().st_mode & 0o666
    for path in made.rglob("*"):
        if path.is_file() and stat.S_IMODE(path.stat().st_mode) != mode:
            path.chmod(mode)


def _replace(out: Path, folder: Path, names: Collection[str]) -> None:
    """Move the new artifact to `out`; at every moment the old artifact or the new one is there.

    If the file system cannot exchange two folders, `out` is missing for a moment. A kill at that
    moment leaves the old artifact in `folder`, next to the new one, and `_settle` moves it back.
    The new artifact is synced to disk before it replaces an old one.
    """
    made, old = folder / MADE, folder / REPLACED
    if not names:
        made.rename(out)  # also over an empty folder
        return
    for path, _, files in os.walk(folder):
        for name in (*files, "."):
            _sync(Path(path, name))
    made.rename(old)
    if not _exchange(old, out):
        old.rename(made)
        out.rename(old)
        made.rename(out)


def _sync(path: Path) -> None:
    """Wait until a file, or a folder's list of names, is on disk."""
    try:
        opened = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(opened)
        finally:
            os.close(opened)
    except OSError as error:
        reraise_if_signalled(error)
        if error.errno not in NO_SYNC:
            raise


def _exchange(one: Path, other: Path) -> bool:
    """Swap two folders in one step. Return False if the system cannot do that."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return False
    paths = (AT_FDCWD, os.fsencode(one), AT_FDCWD, os.fsencode(other))
    if rename(*paths, RENAME_EXCHANGE) == 0:
        return True
    number = ctypes.get_errno()
    if number in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP):
        return False
    raise OSError(number, os.strerror(number), str(other))


def _settle_leftover(folder: Path) -> None:
    """`_settle` a killed process's staging folder. Do nothing if its owner is alive or unknown."""
    with ignoring(OSError, ValueError, KeyError, TypeError), unowned(folder) as said:
        name = Path(said.pop("output")).name
        if said == MARKER and name and not folder.is_symlink():
            _settle(folder, folder.parent / name)
    remove_if_empty(folder)


def _settle(folder: Path, out: Path) -> None:
    """Move an artifact back that was not replaced, and remove kvgraph's other files in `folder`.

    The new artifact's place at `out` is synced to disk before the old artifact is removed.
    """
    made, old = folder / MADE, folder / REPLACED
    if made.is_dir() and old.is_dir() and not os.path.lexists(out):
        old.rename(out)
    shutil.rmtree(made, ignore_errors=True)
    if old.is_dir():
        _sync(folder.parent)
        _remove_listed(old)
    if not old.exists():
        with ignoring(OSError):
            (folder / OWNER).unlink()
            folder.rmdir()


def _remove_listed(folder: Path) -> None:
    """Remove an artifact's files, and its folder unless other files came into it meanwhile."""
    with suppress(ArtifactError):  # the manifest goes last: without it all files are gone already
        names = listed_names(folder)
        for name in [*(names - {MANIFEST_NAME}), MANIFEST_NAME]:
            (folder / name).unlink(missing_ok=True)
    for path, _, _ in os.walk(folder, topdown=False):
        with ignoring(OSError):
            Path(path).rmdir()
    if folder.exists():
        warnings.warn(
            f"{folder}: files that came into the artifact while it was replaced are kept there",
            stacklevel=2,
        )
