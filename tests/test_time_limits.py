"""A user's time limit, whose handler raises TimeoutError, ends what reads or writes files as it is:
it is no damage of a file, and it is not swallowed. What it ended works again."""

from __future__ import annotations

import os
import signal
import socketserver
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import kvgraph
from kvgraph.compiler.checkpoint_files import read_index
from kvgraph.compiler.frontends.folder import read_json
from kvgraph.compiler.output import staging
from kvgraph.contract.leftovers import scratch
from kvgraph.kv.tiers.disk.store import DiskStore
from kvgraph.runtime.machine import default_threads, memory
from kvgraph.runtime.prefix import write_prefix
from kvgraph.runtime.prefix_file import read_prefix
from tests.support.artifacts import Compiled
from tests.support.redis_server import answering

PACKAGE = f"{Path(kvgraph.__file__).parent}{os.sep}"
WATCHED = PACKAGE, os.path.realpath.__code__.co_filename
"""Where a limit may be over: in kvgraph, and where Python resolves a path."""

HANDLERS = f"{PACKAGE}signal_handlers.py"
"""Code that runs once an error is there, and looks at it."""

Line = tuple[str, int]
SIZE = 4096


class Limit:
    """A time limit that is over at a line of the WATCHED files, the first time that it is reached;
    `line` None: never. `seen` has the lines that were reached."""

    def __init__(self, line: Line | None = None) -> None:
        self.seen: dict[Line, None] = {}
        self.is_over = False
        self._line = line

    def __call__(self, call: Callable[[], object]) -> None:
        before = sys.gettrace()
        sys.settrace(self._enter)
        try:
            call()
        finally:
            sys.settrace(before)

    def _enter(self, frame: FrameType, event: str, argument: object) -> Any:
        name = frame.f_code.co_filename
        wanted = name.startswith(WATCHED) if self._line is None else name == self._line[0]
        return self._at if wanted and name != HANDLERS else None

    def _at(self, frame: FrameType, event: str, argument: object) -> Any:
        if event == "line":
            line = frame.f_code.co_filename, frame.f_lineno
            self.seen.setdefault(line)
            if line == self._line:
                sys.settrace(None)
                self.is_over = True
                signal.raise_signal(signal.SIGALRM)
        return self._at


def over(*_: object) -> None:
    raise TimeoutError("the time limit")


@pytest.fixture(autouse=True)
def handler() -> Iterator[None]:
    before = signal.signal(signal.SIGALRM, over)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def lines_of(call: Callable[[], object]) -> list[Line]:
    call()  # imports what it needs
    known = Limit()
    known(call)
    return list(known.seen)


def others(lines: list[Line], call: Callable[[], object]) -> list[str]:
    """Lines at which a limit that is over ends `call` in another way than with its error."""
    found, ended = [], 0
    for line in lines:
        limit, got = Limit(line), "nothing"
        try:
            limit(call)
        except Exception as error:
            got = repr(error)
        if limit.is_over and got != "TimeoutError('the time limit')":
            found.append(f"{line[0].removeprefix(PACKAGE)}:{line[1]}: {got}")
        ended += limit.is_over
    assert ended > len(lines) // 2
    call()
    return found


def test_an_artifact_is_loaded(compiled: Compiled) -> None:
    folder = compiled("tiny-llama")

    def load() -> Any:
        return kvgraph.load(folder)

    def session() -> None:
        load().session(num_threads=1)

    loading = lines_of(load)
    opening = [line for line in lines_of(session) if line not in loading]
    assert not others(loading[::3], load)  # all of them take seconds
    assert not others(opening[::3], session)


def test_a_prefix_is_read(compiled: Compiled, tmp_path: Path) -> None:
    path = tmp_path / "system.kvp"
    engine = kvgraph.Engine(kvgraph.load(compiled("tiny-llama")), num_pages=60)
    write_prefix(engine, list(range(3, 40)), path)

    def read() -> None:
        read_prefix(path)

    assert not others(lines_of(read), read)


def test_files_of_a_checkpoint_and_of_the_machine_are_read(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(
        '{"weight_map": {"weight": "model.safetensors"}}', encoding="utf-8"
    )

    def read() -> None:
        assert read_index(tmp_path) is not None
        read_json(tmp_path / "model.safetensors.index.json")
        default_threads()
        memory()

    assert not others(lines_of(read), read)


def test_a_folder_is_written(tmp_path: Path) -> None:
    def write() -> None:
        with staging(tmp_path / str(len(os.listdir(tmp_path))), force=False) as out:
            (out / "file").write_text("text", encoding="utf-8")
        with scratch("limits") as folder:
            (folder / "file").write_text("text", encoding="utf-8")

    assert not others(lines_of(write), write)
    assert not list(tmp_path.glob(".*/*")), "of folders that are no outputs nothing is left"


def test_a_disk_tier_is_opened_and_used(tmp_path: Path) -> None:
    key = b"k" * 32

    def use() -> None:
        store = DiskStore(tmp_path, 64 * SIZE, b"f" * 32, SIZE)
        try:
            assert store.write(key, [memoryview(b"x" * SIZE)])
            store.flush()
            assert store.read(key, memoryview(bytearray(SIZE)))
        finally:
            store.close()

    assert not others(lines_of(use), use)


def test_a_remote_tier_waits_for_an_answer() -> None:
    """The library for Redis makes its own error of a time-out."""
    from kvgraph.kv.tiers.remote import RemoteStore

    class Silent(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            signal.setitimer(signal.ITIMER_REAL, 0.1)
            while self.request.recv(1024):
                pass

    with answering(Silent) as url, pytest.raises(TimeoutError, match="the time limit"):
        RemoteStore(url, b"f" * 32, SIZE, timeout=60.0)
