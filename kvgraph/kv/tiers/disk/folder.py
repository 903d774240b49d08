"""A disk store's folder: it belongs to one user, has no links, and opening its files never blocks.

Names are looked up in the opened folder, even if its path leads elsewhere later. Files that another
user could write or has made are refused: pages decide what a model computes.
"""

from __future__ import annotations

import errno
import os
import stat
from contextlib import suppress
from pathlib import Path

from kvgraph.contract.files import KINDS, kind_of
from kvgraph.errors import StoreError
from kvgraph.signal_handlers import ignoring

FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
FILE = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


class DamagedError(Exception):
    """Data on the disk that cannot be read, or that has impossible values."""


class PrivateFolder:
    """The folder `name` in `parent`, made if it is missing; only this user may read its entries.

    `is_read`: it is neither made nor changed. StoreError if it is a link or belongs to another
    user. All calls may raise OSError.
    """

    def __init__(self, parent: Path, name: str, *, is_read: bool = False) -> None:
        self.path = parent / name
        top = open_top(parent)
        try:
            if not is_read:
                with suppress(FileExistsError):
                    os.mkdir(name, 0o700, dir_fd=top)
            self._require_folder()
            self.fd = os.open(name, FOLDER, dir_fd=top)
        finally:
            os.close(top)
        try:
            self._require_own()
            if not is_read:
                self._make_private()
        except BaseException:
            self.close()
            raise

    def open(self, name: str, flags: int) -> int:
        """Open a file of the folder; DamagedError if `name` is no regular file."""
        self.require_file(name)
        file = os.open(name, flags | FILE, 0o600, dir_fd=self.fd)
        if not stat.S_ISREG(os.fstat(file).st_mode):
            os.close(file)
            raise DamagedError(f"{name}: expected a file, got something else meanwhile")
        return file

    def names(self) -> list[str]:
        return os.listdir(self.fd)

    def has(self, name: str) -> bool:
        return self._status(name) is not None

    def size(self, name: str) -> int:
        """Size of a file in bytes; 0 if it is missing."""
        status = self._status(name)
        return status.st_size if status else 0

    def require_file(self, name: str) -> None:
        """Raise DamagedError if `name` exists and is no file. The file is not opened, since closing
        it would release the locks that SQLite holds in this process."""
        status = self._status(name)
        kind = KINDS[stat.S_IFMT(status.st_mode)] if status else "a file"
        if kind != "a file":
            raise DamagedError(f"{name}: expected a file, got {kind}")

    def take_over(self, name: str) -> None:
        """Check that a file that was opened by its path is in this folder, and make it private."""
        mine, found = self._status(name), (self.path / name).lstat()
        if mine is None or not os.path.samestat(mine, found):
            raise OSError(errno.ESTALE, f"{self.path} was replaced while it was opened")
        os.chmod(name, 0o600, dir_fd=self.fd)

    def remove(self, name: str) -> None:
        with suppress(FileNotFoundError):
            os.unlink(name, dir_fd=self.fd)

    def close(self) -> None:
        with ignoring(OSError):
            os.close(self.fd)

    def _status(self, name: str) -> os.stat_result | None:
        try:
            return os.stat(name, dir_fd=self.fd, follow_symlinks=False)
        except FileNotFoundError:
            return None

    def _require_folder(self) -> None:
        kind = kind_of(self.path)
        if kind not in ("a folder", None):
            raise StoreError(f"disk tier {self.path}: expected a folder of this tier, got {kind}")

    def _require_own(self) -> None:
        status = os.fstat(self.fd)
        if status.st_uid != os.geteuid():
            raise StoreError(
                f"disk tier {self.path}: expected a folder of user {os.geteuid()}, got one of user "
                f"{status.st_uid}; a tier's folder serves one user, give another"
            )

    def _make_private(self) -> None:
        if os.fstat(self.fd).st_mode & 0o077:
            os.fchmod(self.fd, 0o700)


def make_top(folder: Path) -> None:
    """Make the user's folder if it is missing. StoreError for a link."""
    _refuse_link(folder)
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)


def open_top(folder: Path) -> int:
    """Open the user's folder; returns a file descriptor. StoreError for a link."""
    _refuse_link(folder)
    return os.open(folder, FOLDER)


def _refuse_link(folder: Path) -> None:
    if kind_of(folder) == "a link":
        raise StoreError(
            f"disk tier {folder}: expected a folder, got a link to {os.readlink(folder)}; a tier "
            "follows no links, since it serves one user: give that folder"
        )
