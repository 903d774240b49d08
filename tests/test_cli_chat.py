"""`kvgraph chat`: messages from a pipe, and a user at a terminal."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from kvgraph import Engine, SamplingParams
from kvgraph.cli.chat import Mark, _speed
from tests.support.artifacts import Compiled, rehash
from tests.support.command_line import COMMAND, Outcome, run

SHORT = ("--max-new-tokens", 12)
QUESTION, SECOND = "What is a class?", "And a function?"


@pytest.fixture(scope="module")
def artifact(compiled: Compiled) -> Path:
    return compiled("tiny-llama")


def piped(
    monkeypatch: pytest.MonkeyPatch, artifact: Path, stdin: bytes | str, *options: object
) -> Outcome:
    content = stdin if isinstance(stdin, bytes) else stdin.encode()
    monkeypatch.setattr("sys.stdin", stream_of(content))
    return run("chat", artifact, *SHORT, *options)


def stream_of(content: bytes) -> io.TextIOWrapper:
    """As Python opens stdin, where it is no terminal of Windows: ends of lines stay as they are."""
    return io.TextIOWrapper(io.BytesIO(content), encoding="utf-8", newline="\n")


def answers(artifact: Path, *questions: str, system: str | None = None) -> list[str]:
    """Of the engine itself, asked one after the other in one talk."""
    engine = Engine(artifact, num_pages=100)
    messages = [] if system is None else [{"role": "system", "content": system}]
    texts = []
    for question in questions:
        messages.append({"role": "user", "content": question})
        texts.append(engine.chat(messages, SamplingParams(max_new_tokens=12)).text)
        messages.append({"role": "assistant", "content": texts[-1]})
    return texts


def test_lines_are_messages_of_one_talk(artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing but the answers; empty lines are none, and the last line needs no end."""
    outcome = piped(monkeypatch, artifact, f"{QUESTION}\n\n  \n{SECOND}")
    first, second = answers(artifact, QUESTION, SECOND)
    assert outcome == (0, f"{first}\n{second}\n", "")
    assert second != answers(artifact, SECOND)[0]


def test_lines_as_windows_ends_them(artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    outcome = piped(monkeypatch, artifact, f"{QUESTION}\r\n/quit\r\n{QUESTION}\r\n")
    assert outcome == (0, f"{answers(artifact, QUESTION)[0]}\n", "")


def test_clear_begins_again_behind_the_system_message(
    artifact: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = f"\ufeff{QUESTION}\n/clear \n{SECOND}\n /quit\n{QUESTION}\n"
    outcome = piped(monkeypatch, artifact, lines, "--system", "Be brief.")
    first, second = (answers(artifact, text, system="Be brief.")[0] for text in (QUESTION, SECOND))
    assert outcome == (0, f"{first}\n{second}\n", "")
    assert first != answers(artifact, QUESTION)[0]


def test_sampling(artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hot = ("--temperature", 1.5, "--top-k", 50, "--top-p", 0.9, "--seed")
    first, again, other = (
        piped(monkeypatch, artifact, QUESTION, *hot, seed).out for seed in (1, 1, 2)
    )
    assert first == again != other


def test_a_model_that_says_how_it_is_sampled(
    artifact: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    own = tmp_path / "own.kvg"
    shutil.copytree(artifact, own)
    fields = {"do_sample": True, "temperature": 1.5, "top_k": 50, "top_p": 0.9}
    (own / "generation_config.json").write_text(json.dumps(fields))
    rehash(own)
    hot = ("--temperature", 1.5, "--top-k", 50, "--top-p", 0.9)
    seed = ("--seed", 1)
    said = piped(monkeypatch, own, QUESTION, *seed)
    assert said == piped(monkeypatch, artifact, QUESTION, *seed, *hot)
    greedy = piped(monkeypatch, own, QUESTION, "--temperature", 0)
    assert greedy == piped(monkeypatch, artifact, QUESTION) != said


def test_an_answer_ends_where_the_pool_does(
    artifact: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless the user says how long it is."""
    few = ("--num-pages", 4, "--temperature", 2, "--seed", 1)
    monkeypatch.setattr("sys.stdin", stream_of(QUESTION.encode()))
    outcome = run("chat", artifact, *few)
    assert (outcome.code, outcome.err) == (0, "")
    engine = Engine(artifact, num_pages=4)
    prompt = engine.apply_chat_template([{"role": "user", "content": QUESTION}])
    room = engine._builder.longest_context() - len(prompt)
    assert 0 < room < 100
    sampling = SamplingParams(max_new_tokens=room, temperature=2, seed=1)
    assert outcome.out == f"{engine.generate([prompt], sampling)[0].text}\n"
    monkeypatch.setattr("sys.stdin", stream_of(QUESTION.encode()))
    outcome = run("chat", artifact, *few, "--max-new-tokens", room + 1)
    assert (outcome.code, outcome.out) == (2, "")
    assert "expected at most 4 pages from the pool" in outcome.err


@pytest.mark.parametrize(
    ("stdin", "message"),
    [
        (b"\xff\n", r"stdin: expected text in UTF-8, got .*"),
        ("word " * 3000, r"request .*: expected a prompt of at most 2047 tokens .*"),
    ],
)
def test_what_a_pipe_cannot_bring(
    artifact: Path, monkeypatch: pytest.MonkeyPatch, stdin: bytes | str, message: str
) -> None:
    outcome = piped(monkeypatch, artifact, stdin)
    assert (outcome.code, outcome.out) == (2, "")
    assert re.fullmatch(f"kvgraph: {message}\n", outcome.err)


def test_a_pipe_under_the_c_locale(artifact: Path) -> None:
    """Which takes all bytes for text: they are read as UTF-8 as anywhere else."""
    environment = {k: v for k, v in os.environ.items() if k != "LANG"} | {"LC_ALL": "C"}
    done = subprocess.run(
        [*COMMAND, "chat", str(artifact)],
        input=b"bad \xff utf\n",
        capture_output=True,
        env=environment,
        timeout=60,
    )
    assert (done.returncode, done.stdout) == (2, b"")
    assert done.stderr.startswith(b"kvgraph: stdin: expected text in UTF-8, got 'utf-8' codec")


def test_an_artifact_without_a_tokenizer(
    compiled: Compiled, monkeypatch: pytest.MonkeyPatch
) -> None:
    outcome = piped(monkeypatch, compiled("llama"), QUESTION)
    assert (outcome.code, outcome.out) == (2, "")
    said = "kvgraph: .*: expected tokenizer.json for chats, got none; add it to the model folder"
    assert re.match(said, outcome.err)


# -- a terminal


class Terminal:
    """A process at a terminal of its own."""

    def __init__(self, *command: str, locale: str | None = None) -> None:
        self._file, slave = pty.openpty()
        environment = os.environ | {"TERM": "dumb"} | ({"LC_ALL": locale} if locale else {})
        self.process = subprocess.Popen(
            command, stdin=slave, stdout=slave, stderr=slave, env=environment
        )
        os.close(slave)

    def type(self, text: str) -> None:
        os.write(self._file, text.encode(errors="surrogateescape"))

    def until(self, end: str) -> str:
        """What is shown from here to `end`."""
        shown = ""
        while not shown.endswith(end):
            shown += os.read(self._file, 1).decode(errors="replace")
        return shown

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._file)


@pytest.fixture
def terminal(artifact: Path) -> Iterator[Terminal]:
    options = ("--max-new-tokens", "1900", "--temperature", "2", "--seed", "1")
    with closing(Terminal(*COMMAND, "chat", str(artifact), *options)) as opened:
        opened.until("> ")
        yield opened


def test_an_interrupt_stops_the_answer_and_keeps_the_talk(terminal: Terminal) -> None:
    terminal.type(f"{QUESTION}\n")
    assert terminal.until(QUESTION)
    terminal.until(" ")  # of the answer
    terminal.process.send_signal(signal.SIGINT)
    shown = terminal.until("tokens/s")
    figures = r"(\d+) tokens, the first after [\d.]+ s, then [\d.]+ tokens/s$"
    count = re.search(figures, shown)
    assert count is not None
    assert 0 < int(count[1]) < 1900
    terminal.until("> ")
    terminal.type("\x04")
    assert terminal.process.wait(60) == 0


@pytest.mark.parametrize(
    ("marks", "expected"),
    [
        (((5, 1.0), (6, 2.25), (8, 3.25)), "3 tokens, the first after 1.25 s, then 2.0 tokens/s"),
        (((5, 1.0), (6, 2.25), (6, 2.5)), "1 token, the first after 1.25 s"),
        (((5, 1.0), (5, 2.25), (5, 2.25)), "0 tokens"),
    ],
)
def test_the_speed_of_an_answer(marks: tuple[Mark, Mark, Mark], expected: str) -> None:
    assert _speed(*marks) == expected


def test_a_message_that_is_refused_ends_no_talk(terminal: Terminal) -> None:
    long = "☃" * 1000  # 3 tokens each, and no more bytes than a terminal takes at once
    terminal.type(f"{long}\n")
    terminal.until("expected a prompt of at most 2047 tokens")
    terminal.until("> ")
    terminal.type("/quit\n")
    assert terminal.process.wait(60) == 0


def test_a_line_that_is_no_text_ends_no_talk(artifact: Path) -> None:
    with closing(Terminal(*COMMAND, "chat", str(artifact), locale="C.UTF-8")) as terminal:
        terminal.until("> ")
        terminal.type("a \udcff\n")
        terminal.until("stdin: expected text in UTF-8")
        terminal.until("> ")
        terminal.type("/quit\n")
        assert terminal.process.wait(60) == 0
