"""Atomic writes, paths that stay inside their folder, and opens that never block."""

from __future__ import annotations

import errno
import json
import os
import re
import secrets
import stat
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import BinaryIO, TypeVar

from kvgraph.contract.manifest_values import require_plain_text
from kvgraph.contract.plain import JsonObject, from_plain, in_short
from kvgraph.errors import ArtifactError, KVGraphError, RequestError
from kvgraph.signal_handlers import reraise_if_signalled

T = TypeVar("T")

PARTIAL = re.compile(r"\.kvgraph-[0-9a-f]{16}\.partial")
"""Pattern of the names of files that are being written; a killed process may leave one."""

NO_ROOM = (errno.EFBIG, errno.ENOSPC, errno.EDQUOT, errno.EIO)
"""Error numbers of a file system that takes no more data."""

KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFLNK: "a link",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFREG: "a file",
}


class _WriteError(ArtifactError, OSError):
    """An ArtifactError that is an OSError too, for callers that can go on without the file."""


def as_path(name: str, given: object) -> Path:
    """Return `given` as a Path; raise ArtifactError if it is no path of text, or an empty one."""
    if isinstance(given, str | os.PathLike) and given != "":  # Path("") is the working folder
        with suppress(TypeError):  # a path of bytes
            return Path(given)
    raise ArtifactError(f"{name}: expected a path, got {type(given).__name__} {given!r}"[:200])


@contextmanager
def naming(path: Path, partial: str = "") -> Iterator[None]:
    """Turn a failed write into an ArtifactError that names `path`: an OSError that names `partial`,
    or that has an error number of NO_ROOM and names no file, a copy's two files, or one in the
    folder `partial`."""
    try:
        yield
    except OSError as error:
        reraise_if_signalled(error)
        is_copy = error.filename2 is not None and error.errno != errno.EIO  # may be the source's
        is_ours = error.filename is None or _is_in(error.filename, partial)
        is_full = error.errno in NO_ROOM and (is_ours or is_copy)
        if not is_full and (error.filename is None or error.filename != partial):
            raise
        raise _WriteError(f"{path}: expected to write all of it, got {error.strerror!r}") from error


def _is_in(filename: object, folder: str) -> bool:
    """Whether a file that an OSError names is in `folder`; "": no folder."""
    if not folder or not isinstance(filename, str | bytes | os.PathLike):
        return False
    return Path(os.fsdecode(filename)).is_relative_to(folder)


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Write a new file that replaces `path` when the scope ends; an error leaves `path` unchanged.

    The data is synced to disk before the file is visible. Its permissions follow the umask. Raises
    ArtifactError, which is an OSError too, if the file cannot be written.
    """
    partial = path.with_name(f".kvgraph-{secrets.token_hex(8)}.partial")
    try:
        with naming(path, str(partial)):
            with partial.open("xb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            partial.replace(path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


def require_replaceable(path: Path, is_ours: Callable[[Path], bool], what: str) -> None:
    """Raise RequestError unless `path` can be written: nothing is there, or a file that `is_ours`.

    `what`: describes such a file in the error. A link, a pipe or a device at `path` is refused.
    """
    if not path.parent.is_dir():
        raise RequestError(f"{path}: expected a file in a folder that exists, got none there")
    if not can_write(path.parent):
        raise RequestError(f"{path}: expected a folder that can be written, got {path.parent}")
    kind = kind_of(path)
    got = _another(path, is_ours) if kind == "a file" else kind
    if got is not None:
        raise RequestError(
            f"{path}: expected no such file, or {what} to replace, got {got} (kept); "
            "give another name"
        )


def _another(path: Path, is_ours: Callable[[Path], bool]) -> str | None:
    """Description of a file that must be kept; None if it is ours and may be replaced."""
    try:
        return None if is_ours(path) else "another file"
    except OSError as error:
        reraise_if_signalled(error)
        return "one that cannot be read"


def require_utf8(path: Path, reader: str) -> None:
    """Raise ArtifactError for a path that the library `reader` cannot open: one that is not UTF-8,
    or that a locale without UTF-8 has decoded."""
    try:
        stored = os.fsencode(path)
        if stored.decode() == str(path):
            return
    except UnicodeDecodeError:
        raise ArtifactError(
            f"{path}: expected a path in UTF-8 for {reader}, got {stored!r}"
        ) from None
    except UnicodeEncodeError:  # the locale does not have such a character
        pass
    raise ArtifactError(
        f"{path}: expected a locale of UTF-8 for {reader}, got {sys.getfilesystemencoding()!r}; "
        "set PYTHONUTF8=1"
    )


def kind_of(path: Path) -> str | None:
    """Kind of the file at `path`, such as "a folder"; None if there is none. Does not follow links.
    Raises OSError, also for a path with a NUL."""
    try:
        return KINDS[stat.S_IFMT(path.lstat().st_mode)]
    except (FileNotFoundError, NotADirectoryError):
        return None
    except ValueError as error:
        raise OSError(errno.EINVAL, f"{os.strerror(errno.EINVAL)} ({error})") from error


def can_write(folder: Path) -> bool:
    """Whether this process may make and remove files in `folder`."""
    return _may(folder, os.W_OK | os.X_OK)


def can_read(folder: Path) -> bool:
    """Whether this process may list `folder`."""
    return _may(folder, os.R_OK)


def _may(folder: Path, mode: int) -> bool:
    return os.access(folder, mode, effective_ids=os.access in os.supports_effective_ids)


def read_text(path: Path, refusal: type[KVGraphError]) -> str:
    """Return the text of a file; raise `refusal` if it cannot be read or is not UTF-8."""
    try:
        with open_regular(path) as file:
            return file.read().decode()
    except (OSError, UnicodeDecodeError) as error:
        reraise_if_signalled(error)
        raise refusal(f"{path}: expected text in UTF-8, got {error}") from error


def read_fields(path: Path, refusal: type[KVGraphError]) -> JsonObject:
    """Return the fields of a JSON file, {} if it is missing; raise `refusal` if it is damaged."""
    if not path.exists():
        return {}
    text = read_text(path, refusal)
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise refusal(f"{path}: expected JSON, got a damaged file ({in_short(error)})") from error
    if not isinstance(fields, dict):
        raise refusal(f"{path}: expected fields, got {type(fields).__name__}")
    return fields


def read_list(path: Path, kind: type[T], what: str, refusal: type[KVGraphError]) -> list[T]:
    """Return the `kind`s of a JSON file; raise `refusal`, which names `what` they are, if it is
    missing or damaged."""
    try:
        with reading(path, refusal), open_regular(path) as file:
            found = json.loads(file.read())
        require_plain_text(found)
        return from_plain(list[kind], found)  # type: ignore[valid-type]
    except refusal:
        raise
    except (OSError, ValueError, RecursionError) as error:
        reraise_if_signalled(error)
        raise refusal(
            f"{path}: expected a list of {what}, got a damaged file ({in_short(error)})"
        ) from error


def resolved(path: Path) -> Path:
    """`path.resolve()`, which lets through what a signal handler raised: Python's own swallows an
    OSError, unless it is strict."""
    try:
        return path.resolve(strict=True)
    except OSError as error:
        reraise_if_signalled(error)
        return path.resolve()


def inside(folder: Path, name: str) -> Path | None:
    """The path of `name` in `folder`; None if the name, or a link in the path, leads outside.

    ArtifactError for a relative path in a working folder that was removed.
    """
    try:
        path = resolved(folder / name)
    except FileNotFoundError as error:
        raise ArtifactError(
            f"{folder}: expected a working folder for a relative path, got one that was removed; "
            "change to another one, or give the whole path"
        ) from error
    except (ValueError, OSError, RuntimeError) as error:
        reraise_if_signalled(error)
        return None  # a NUL, too long a name, links in a circle
    is_inside = path.is_relative_to(resolved(folder)) and ".." not in PurePosixPath(name).parts
    return folder / name if is_inside and not name.startswith("/") else None


@contextmanager
def reading(path: Path, refusal: type[KVGraphError]) -> Iterator[None]:
    """Raise `refusal` if the system fails to read an existing file, which may be undamaged."""
    try:
        yield
    except OSError as error:
        reraise_if_signalled(error)
        # An error without `strerror` comes from this module (`open_regular`).
        if error.strerror is None or isinstance(error, FileNotFoundError):
            raise
        raise refusal(
            f"{path}: expected a file that can be read, got {error.strerror!r}"
        ) from error


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file for reading; links are followed. Raises OSError for any other kind of
    file; a pipe does not block."""
    file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        kind = KINDS[stat.S_IFMT(os.fstat(file).st_mode)]
        if kind != "a file":
            raise OSError(f"expected a file, got {kind}")
        return os.fdopen(file, "rb")
    except BaseException:
        os.close(file)
        raise
