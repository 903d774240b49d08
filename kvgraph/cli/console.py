"""Output of commands: text, JSON, and the stages of a compile."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from io import TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from kvgraph.bars import Bars
from kvgraph.contract.plain import to_json
from kvgraph.signal_handlers import is_heard

if TYPE_CHECKING:
    from kvgraph.contract.manifest import Manifest

# No markup, no emoji: paths are printed unchanged, including "[a]" and ":x:".
stdout = Console(highlight=False, markup=False, emoji=False)
stderr = Console(stderr=True, highlight=False, markup=False, emoji=False)


class Stages:
    """The compile's stages on stderr: a row for the running one, seconds for each done."""

    def __init__(self) -> None:
        self.bars = Bars(stderr)
        self._stage = ""
        self._start = 0.0

    def next(self, stage: str) -> None:
        self.done()
        self._stage, self._start = stage, time.perf_counter()
        self.bars.stage(stage)

    def done(self) -> None:
        if self._stage:
            stderr.print(
                f"{time.perf_counter() - self._start:6.1f} s  {self._stage}", soft_wrap=True
            )
        self._stage = ""


@contextmanager
def terminable() -> Iterator[None]:
    """A scope that SIGTERM and SIGHUP end like Ctrl-C, so that incomplete output is removed.

    Python ignores an exception in a callback, such as those of imports: the signal is sent again.
    An exception while Python formats a message is replaced by another one: the scope still ends as
    the signal requires.
    """
    came: list[int] = []

    def stop(number: int, frame: object) -> None:
        came.append(number)
        raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number)

    def send_again(ignored: sys.UnraisableHookArgs) -> None:
        if not came or ignored.exc_type not in (SystemExit, KeyboardInterrupt):
            hook(ignored)
        else:  # later, from another thread: an exception of the hook itself is ignored too
            threading.Timer(0.01, os.kill, (os.getpid(), came.pop())).start()

    numbers = [signal.SIGTERM]
    if is_heard(signal.SIGHUP):
        numbers.append(signal.SIGHUP)
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        numbers.append(signal.SIGINT)
    hook, before = sys.unraisablehook, [signal.signal(number, stop) for number in numbers]
    sys.unraisablehook = send_again
    try:
        yield
    except Exception:
        if came:
            stop(came.pop(), None)
        raise
    finally:
        sys.unraisablehook = hook
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


@contextmanager
def working(stage: str) -> Iterator[None]:
    """A scope that shows on stderr the running stage, and the progress of its long tasks."""
    with Bars(stderr) as bars:
        bars.stage(stage)
        yield


def print_json(value: object) -> None:
    write_json(to_json(value, indent=1, errors="backslashreplace") + b"\n")


def write_json(data: bytes) -> None:
    """Write to stdout in UTF-8, whatever its encoding. Flush, to notice a reader that has left."""
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.flush()
        sys.stdout.buffer.write(data)
    else:  # a stream that takes only text
        sys.stdout.write(data.decode())
    sys.stdout.flush()


def summary(folder: Path, manifest: Manifest) -> dict[str, object]:
    return {
        "artifact": str(folder),
        "architecture": manifest.model.architecture,
        "backend": manifest.backend,
        "target": manifest.target,
        "weights": manifest.weights,
        "identity": manifest.identity.hex(),
        "bytes": manifest.nbytes,
        "files": sorted(manifest.files),
        "notes": manifest.notes,
    }
