"""Where commands print, and how: text, JSON, sizes, the stages of a compile."""

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

if TYPE_CHECKING:
    from kvgraph.contract.manifest import Manifest

# No markup, no emoji: a path is printed as it is, "[a]" and ":x:" included.
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
    """A scope that SIGTERM and SIGHUP end as Ctrl-C does: what is half made is removed.

    Python ignores an exception in a callback, and each import has some: the signal is sent again.
    Python puts another exception in the place of one that comes while it formats a message: the
    scope ends as the signal says.
    """
    came: list[int] = []

    def stop(number: int, frame: object) -> None:
        came.append(number)
        raise KeyboardInterrupt if number == signal.SIGINT else SystemExit(128 + number)

    def send_again(ignored: sys.UnraisableHookArgs) -> None:
        if not came or ignored.exc_type not in (SystemExit, KeyboardInterrupt):
            hook(ignored)
        else:  # later, and from another thread: what the hook itself raises is ignored too
            threading.Timer(0.01, os.kill, (os.getpid(), came.pop())).start()

    numbers = [signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:  # not under nohup
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
    """A scope that says on stderr what runs, and how far its long tasks are."""
    with Bars(stderr) as bars:
        bars.stage(stage)
        yield


def print_json(value: object) -> None:
    write_json(to_json(value, indent=1, errors="backslashreplace") + b"\n")


def write_json(data: bytes) -> None:
    """To stdout in UTF-8, whatever the terminal has; now, as a reader may have left."""
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.flush()
        sys.stdout.buffer.write(data)
    else:  # a stream of text alone
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
        "bytes": sum(entry.size for entry in manifest.files.values()),
        "files": sorted(manifest.files),
        "notes": manifest.notes,
    }
