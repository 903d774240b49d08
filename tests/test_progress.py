"""What a listener is told of long tasks, and what a terminal shows of it."""

from __future__ import annotations

import io
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
from rich.console import Console

import kvgraph
from kvgraph import bars, progress
from kvgraph.contract.hashes import hash_files
from tests.support.command_line import run


class Told:
    """A listener that adds up."""

    def __init__(self) -> None:
        self.totals: dict[str, int] = {}
        self.done: dict[str, int] = defaultdict(int)
        self.open: list[str] = []

    @contextmanager
    def task(self, what: str, total: int, unit: str) -> Iterator[progress.Advance]:
        self.totals[what] = total
        self.open.append(what)

        def advance(count: int) -> None:
            assert what in self.open
            self.done[what] += count

        yield advance
        self.open.remove(what)


@pytest.fixture
def told() -> Iterator[Told]:
    listener = Told()
    with progress.listening(listener):
        yield listener


def test_the_innermost_task_is_the_one_that_advances(told: Told) -> None:
    with progress.task("outer", 5, "steps"):
        progress.advance()
        with progress.task("inner", 3, "steps"):
            progress.advance(2)
        progress.advance()
    progress.advance()
    assert told.done == {"outer": 2, "inner": 2}


def test_nobody_is_told_without_a_listener_or_in_another_thread() -> None:
    with progress.task("alone", 1, "steps") as advance:
        advance(1)
        progress.advance()
    listener = Told()
    with progress.listening(listener), ThreadPoolExecutor(1) as pool:
        assert not pool.submit(progress.is_followed).result()
        assert progress.is_followed()
    assert not progress.is_followed()


def test_hashing_tells_all_bytes(told: Told, tmp_path: Path) -> None:
    for name, size in (("a", 3), ("b", 5 << 20), ("c", 0)):
        (tmp_path / name).write_bytes(bytes(size))
    hash_files(tmp_path, ["a", "b", "c"])
    assert told.done == told.totals == {"hashing": 3 + (5 << 20)}


def test_opening_again_tells_the_bytes_that_it_hashes(
    told: Told, compiled: Callable[..., Path]
) -> None:
    folder = compiled("tiny-llama")
    told.totals.clear()
    told.done.clear()
    artifact = kvgraph.load(folder, verify=True)
    files = sum(entry.size for entry in artifact.manifest.files.values())
    assert told.done == told.totals == {"hashing": files}


def test_generating_tells_the_tokens_of_all_requests(
    told: Told, compiled: Callable[..., Path]
) -> None:
    artifact = kvgraph.load(compiled("tiny-llama"))
    told.totals.clear()
    told.done.clear()
    prompts = [[1, *range(5, 50)], [1, 7, 8]]
    sampling = kvgraph.SamplingParams(max_new_tokens=6, ignore_eos=True)
    with kvgraph.Engine(artifact, max_batch_tokens=16) as engine:
        engine.generate(prompts, sampling)
    assert told.done == told.totals == {"processing": 46 + 3 + 2 * 6}


def test_a_stream_tells_the_tokens_of_its_prompt(told: Told, compiled: Callable[..., Path]) -> None:
    artifact = kvgraph.load(compiled("tiny-llama"))
    told.totals.clear()
    told.done.clear()
    with kvgraph.Engine(artifact, max_batch_tokens=16) as engine:
        pieces = engine.stream([1, *range(5, 50)], kvgraph.SamplingParams(ignore_eos=True))
        next(pieces)
        assert told.done == told.totals == {"prompt": 46}
        assert told.open == []
        assert list(pieces)
    assert told.done == told.totals == {"prompt": 46}


@pytest.mark.parametrize(
    ("command", "options", "task"),
    [
        ("generate", (), "prompt"),
        ("generate", ("--json",), "processing"),
        ("chat", (), "prompt"),
    ],
)
def test_commands_that_generate_show_it(
    command: str,
    options: tuple[str, ...],
    task: str,
    compiled: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told, folder = Told(), compiled("tiny-llama")
    module = sys.modules[f"kvgraph.cli.{command}"]
    monkeypatch.setattr(module, "Bars", lambda console: progress.listening(told))
    prompt = ("The import statement",) if command == "generate" else ()
    monkeypatch.setattr("sys.stdin", io.StringIO("What is a class?"))
    assert run(command, folder, *prompt, *options, "--max-new-tokens", 4).code == 0
    assert told.totals.keys() == {task}
    assert told.done == told.totals


def test_compiling_tells_layers_and_bytes(
    told: Told, tmp_path: Path, model_folder: Callable[[str], Path]
) -> None:
    kvgraph.compile(model_folder("tiny-llama"), tmp_path / "a.kvg", weights="int8", check=False)
    assert told.totals.keys() == {"tracing", "writing weights", "hashing"}
    assert told.done == told.totals


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("seconds", [0.0, 100.0])
def test_a_terminal_shows_tasks_that_take_long(
    seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bars, "SHOWN_AFTER", seconds)
    screen = Terminal()
    console = Console(file=screen, force_terminal=True, width=100)
    with bars.Bars(console) as shown:
        shown.stage("reading [the] model")
        with progress.task("hashing", 4_000_000_000, "bytes") as advance:
            advance(1_000_000_000)
            shown.refresh()
        with progress.task("scoring", 2048, "tokens") as advance:
            advance(1024)
            shown.refresh()
    text = screen.getvalue()
    assert "reading [the] model" in text
    assert ("25 %  1.0 GB of 4.0 GB" in text) is (seconds == 0)
    assert ("50 %  1,024 of 2,048 tokens" in text) is (seconds == 0)
    assert not progress.is_followed()


def test_nothing_is_written_where_stderr_is_no_terminal(
    capfd: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bars, "SHOWN_AFTER", 0.0)
    (tmp_path / "a").write_bytes(b"a")
    with kvgraph.show_progress(), kvgraph.show_progress():
        hash_files(tmp_path, ["a"])
    assert capfd.readouterr() == ("", "")
