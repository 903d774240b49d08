"""Unix sockets: a path that clients of the same machine connect to."""

from __future__ import annotations

import errno
import os
import socket
from contextlib import suppress
from pathlib import Path


def listen_at(path: Path, backlog: int) -> socket.socket:
    """A socket that another process left behind is replaced. OSError for any other file."""
    expected = f"{path}: expected a path for a Unix socket"
    if answers_at(path):
        raise OSError(f"{expected}, got one where another process answers; choose another path")
    if os.path.lexists(path) and not path.is_socket():
        raise OSError(f"{expected}, got another file there; choose another path")
    made = socket.socket(socket.AF_UNIX)
    try:
        path.unlink(missing_ok=True)
        made.bind(str(path))
        made.listen(backlog)
    except OSError as error:
        made.close()
        raise OSError(f"{expected}, got {error}; choose another path") from error
    return made


def place_of(path: Path) -> tuple[int, int] | None:
    """Device and inode of the file at `path`: another file has others. None without a file."""
    try:
        found = path.lstat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


def answers_at(path: str | Path) -> bool:
    """Whether a process listens there."""
    with socket.socket(socket.AF_UNIX) as probe, suppress(OSError):
        probe.setblocking(False)
        return probe.connect_ex(str(path)) in (0, errno.EAGAIN)  # which says that its queue is full
    return False
