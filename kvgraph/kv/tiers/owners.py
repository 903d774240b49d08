"""Which processes are alive: each holds a lock on a file of its own, which a kill lets go of."""

from __future__ import annotations

import fcntl
import os
import re
import secrets
from contextlib import suppress
from pathlib import Path


class Owner:
    """This process, or rather one store of it, in a folder. The calls may raise OSError."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        while True:
            self.token = secrets.token_hex(8)
            self._file = os.open(self._path(self.token), os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
            fcntl.flock(self._file, fcntl.LOCK_EX)
            if self._path(self.token).exists():  # not buried before it was locked
                return
            os.close(self._file)

    def is_alive(self, token: str) -> bool:
        if token == self.token:
            return True
        if re.fullmatch("[0-9a-f]{16}", token) is None:
            return False
        try:
            file = os.open(self._path(token), os.O_RDWR)
        except FileNotFoundError:
            return False
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(file)
        return False

    def bury(self) -> None:
        """Remove the files of those that are gone."""
        for path in self._folder.glob("*.owner"):
            if not self.is_alive(path.stem):
                path.unlink(missing_ok=True)

    def close(self) -> None:
        with suppress(OSError):
            self._path(self.token).unlink()
        with suppress(OSError):
            os.close(self._file)

    def _path(self, token: str) -> Path:
        return self._folder / f"{token}.owner"
