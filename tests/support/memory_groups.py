"""Processes that may use little memory: a control group made for them, and removed after them.

A group counts the pages of files that its processes read, mapped or not, unless another group has
read them before.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

ROOT, OWN = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
JOIN = 'echo $$ > "$0" && exec "$@"'


class MemoryGroup:
    """A control group of version 1 or 2 (Linux, admin-guide/cgroup-v1/memory and cgroup-v2)."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def command(self, command: Sequence[object]) -> tuple[str, ...]:
        """`command` in a process of the group."""
        return ("sh", "-c", JOIN, str(self._folder / "cgroup.procs"), *map(str, command))

    def was_full(self) -> bool:
        """Whether a process needed more, so that pages of files had to go."""
        if (self._folder / "memory.failcnt").exists():
            return int((self._folder / "memory.failcnt").read_text()) > 0
        events = dict(map(str.split, (self._folder / "memory.events").read_text().splitlines()))
        return int(events["max"]) > 0

    def limit(self, most: int) -> None:
        for name in ("memory.limit_in_bytes", "memory.max"):
            if (self._folder / name).exists():
                (self._folder / name).write_text(str(most))
                if name == "memory.max" and (self._folder / "memory.swap.max").exists():
                    (self._folder / "memory.swap.max").write_text("0")
                return
        raise OSError(f"{self._folder}: no memory controller")


@contextmanager
def memory_group(most: int) -> Iterator[MemoryGroup]:
    """A group of at most `most` bytes. Skips where none can be made."""
    folder = _parent() / f"kvgraph-test-{os.getpid()}"
    try:
        folder.mkdir()
    except OSError as error:
        pytest.skip(f"{folder}: no control group can be made here ({error.strerror})")
    try:
        group = MemoryGroup(folder)
        try:
            group.limit(most)
        except OSError as error:
            pytest.skip(f"{folder}: a control group without a limit of memory ({error})")
        if subprocess.run(group.command(["true"]), capture_output=True).returncode:
            pytest.skip(f"{folder}: no process of this user may join the control group")
        yield group
    finally:
        _remove(folder)


def _parent() -> Path:
    """The group that this process is in; of version 2, the nearest one whose groups have limits."""
    groups = dict(line.split(":", 2)[1:] for line in OWN.read_text().splitlines())
    for controllers, path in groups.items():
        if "memory" in controllers.split(","):
            return ROOT / controllers / path.strip("/")
    own = ROOT / groups.get("", "").strip("/")
    for folder in (own, *own.parents):
        file = folder / "cgroup.subtree_control"
        if folder.is_relative_to(ROOT) and file.exists() and "memory" in file.read_text().split():
            return folder
    pytest.skip("no control groups of memory here")


def _remove(folder: Path) -> None:
    """Its processes have ended, but the system may still count them for a moment."""
    for _ in range(100):
        try:
            return folder.rmdir()
        except OSError:
            time.sleep(0.05)
    folder.rmdir()
