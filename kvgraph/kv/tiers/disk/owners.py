"""Detection of live processes: each holds a lock on its own file, and a kill releases the lock.

A file with a byte says that its process has checked the index, or trusts a process that has. While
one of these lives the index is not checked again: a check takes long and stops all others.
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
from contextlib import ExitStack

from kvgraph.contract.leftovers import NO_LOCKS
from kvgraph.errors import StoreError
from kvgraph.kv.tiers.disk.folder import PrivateFolder
from kvgraph.signal_handlers import ignoring, reraise_if_signalled

OWNER = re.compile(r"([0-9a-f]{16})\.owner")


class Owner:
    """One store of this process as an owner of slots in a folder.

    Calls may raise OSError, or DamagedError for an entry that is no file. The constructor also
    raises StoreError for a file system without locks.
    """

    def __init__(self, folder: PrivateFolder) -> None:
        self._folder = folder
        self._process = os.getpid()
        while True:
            self.token = secrets.token_hex(8)
            self._file = folder.open(_name(self.token), os.O_CREAT | os.O_EXCL | os.O_RDWR)
            try:
                self._lock()
                if folder.has(_name(self.token)):  # another process did not remove it before
                    return
            except BaseException:
                self.close()
                raise
            os.close(self._file)

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX)
        except OSError as error:
            reraise_if_signalled(error)
            if error.errno not in NO_LOCKS:
                raise
            raise StoreError(
                f"disk tier {self._folder.path}: expected a file system with locks (flock), "
                f"got {error.strerror!r}"
            ) from error

    def is_alive(self, token: str) -> bool:
        if token == self.token:
            return True
        if OWNER.fullmatch(_name(token)) is None:
            return False
        try:
            file = self._folder.open(_name(token), os.O_RDWR)
        except FileNotFoundError:
            return False
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(file)
        return False

    def is_index_trusted(self) -> bool:
        """Whether another live process trusts the index."""
        others = [name for name in self._folder.names() if name != _name(self.token)]
        found = [match[1] for name in others if (match := OWNER.fullmatch(name))]
        return any(self._folder.size(_name(token)) and self.is_alive(token) for token in found)

    def trust_index(self) -> None:
        """Tell others that the index need not be checked while this process lives."""
        with ignoring(OSError):  # then they check it
            os.ftruncate(self._file, 1)  # needs no block of a full disk

    def remove(self) -> None:
        """Remove the files of dead owners."""
        for name in self._folder.names():
            match = OWNER.fullmatch(name)
            if match and not self.is_alive(match[1]):
                self._folder.remove(name)

    def close(self) -> None:
        """Remove the owner's file and release its lock; in a fork the file stays: it is the
        parent's."""
        with ExitStack() as parts:
            parts.enter_context(ignoring(OSError))
            parts.callback(os.close, self._file)
            parts.enter_context(ignoring(OSError))
            if self._process == os.getpid():
                self._folder.remove(_name(self.token))


def _name(token: str) -> str:
    return f"{token}.owner"
