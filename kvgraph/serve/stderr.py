"""Lines on stderr. A thread writes them, unless stderr is a file: a reader may stop reading."""

from __future__ import annotations

import os
import select
import stat
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import UnsupportedOperation

from kvgraph.contract.threads import threads_needed
from kvgraph.serve.held_lines import HeldLines

END_SECONDS = 1.0
"""Time in which the last lines must be written."""


def write_text(text: str) -> None:
    """Write a line to stderr; within `written_behind` without waiting for a reader.

    A missing or closed reader of the log causes no error.
    """
    if (writer := _Current.writer) is None:
        _write(text)
    else:
        writer.add(text)


@contextmanager
def written_behind() -> Iterator[None]:
    """A scope in which a thread writes the lines, unless stderr is a file.

    At the end, a reader that does not take the lines in END_SECONDS gets nothing more of this
    process. CapacityError if the system refuses the thread.
    """
    if _is_file():
        yield
        return
    _Current.writer = writer = _Writer()
    try:
        writer.start()
        yield
    finally:
        try:
            writer.close()
        finally:
            _Current.writer = None


class _Writer:
    """Writes lines in their order. Every thread may add one, and so may a signal handler."""

    def __init__(self) -> None:
        # Reentrant, as a handler may interrupt `add`.
        self._changed = threading.Condition(threading.RLock())
        self._lines = HeldLines()
        self._is_idle = True
        self._has_ended = False

    def start(self) -> None:
        with threads_needed():
            threading.Thread(target=self._run, name="kvgraph-log", daemon=True).start()

    def add(self, line: str) -> None:
        with self._changed:
            self._lines.add([line])
            self._is_idle = False
            self._changed.notify_all()

    def close(self) -> None:
        with self._changed:
            self._has_ended = True
            self._changed.notify_all()
            if not self._changed.wait_for(lambda: self._is_idle, END_SECONDS):
                _leave()

    def _run(self) -> None:
        while lines := self._next():
            for line in lines:
                _write(line)

    def _next(self) -> list[str]:
        """The lines that wait, once there are some; none at the end."""
        with self._changed:
            while not (lines := self._lines.take()):
                self._is_idle = True
                self._changed.notify_all()
                if self._has_ended:
                    break
                self._changed.wait()
            return lines


class _Current:
    """The writer of this process."""

    writer: _Writer | None = None


def _forget() -> None:
    """Let a forked process, which has no thread that writes, write by itself."""
    _Current.writer = None


os.register_at_fork(after_in_child=_forget)


def _write(text: str) -> None:
    """Write a line, not through Python's buffer, whose lock the end of Python waits for."""
    if (stream := sys.stderr) is None:
        return
    with suppress(OSError, ValueError):
        try:
            number = stream.fileno()
        except (UnsupportedOperation, AttributeError):  # a stream of Python's
            stream.write(f"{text}\n")
            return
        left = f"{text}\n".encode(stream.encoding, stream.errors or "strict")
        while left:
            try:
                left = left[os.write(number, left) :]
            except BlockingIOError:
                select.select([], [number], [])
            except BrokenPipeError:
                _leave()
                return


def _is_file() -> bool:
    """Whether stderr is a regular file, which takes every line at once."""
    try:
        return sys.stderr is not None and stat.S_ISREG(os.fstat(sys.stderr.fileno()).st_mode)
    except (OSError, ValueError, AttributeError):
        return False


def _leave() -> None:
    """Send all that is written to stderr from now on to the null device.

    Otherwise Python's own writes at the end would fail, with status 120, or wait for a reader.
    """
    with suppress(OSError, ValueError, AttributeError), open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), sys.stderr.fileno())
