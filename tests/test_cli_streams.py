"""Commands whose streams the shell has closed, and signals to them."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from kvgraph import cli
from kvgraph.serve import log
from tests.support.artifacts import Compiled
from tests.support.command_line import COMMAND


@pytest.mark.parametrize(
    ("closed", "arguments"),
    [
        (">&-", ("generate", "{model}", "The", "--max-new-tokens", "2")),
        ("2>&-", ("generate", "{model}", "The", "--max-new-tokens", "2")),
        ("<&-", ("chat", "{model}")),
        ("<&- >&- 2>&-", ("inspect", "{model}")),
    ],
)
def test_a_stream_that_is_closed(
    closed: str, arguments: tuple[str, ...], compiled: Compiled
) -> None:
    given = [each.format(model=compiled("tiny-llama")) for each in arguments]
    command = ["sh", "-c", f'exec "$@" {closed}', "sh", *COMMAND, *given]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=180)
    assert "Traceback" not in done.stderr
    assert done.returncode == 0, done.stderr


@pytest.fixture
def snowman(compiled: Compiled, tmp_path: Path) -> Path:
    """An artifact at a path that is not all ASCII."""
    path = tmp_path / "\u2603.kvg"
    path.symlink_to(compiled("tiny-llama"))
    return path


def in_ascii(*arguments: object) -> subprocess.CompletedProcess[bytes]:
    """A command at a terminal of so few characters."""
    command = [*COMMAND, *map(str, arguments)]
    environment = os.environ | {"PYTHONIOENCODING": "ascii"}
    return subprocess.run(command, capture_output=True, env=environment, timeout=180)


def test_a_terminal_that_lacks_a_character_shows_a_question_mark(snowman: Path) -> None:
    done = in_ascii("verify", snowman)
    assert (done.returncode, done.stderr) == (0, b"")
    assert done.stdout.startswith(f"{snowman.parent}/?.kvg: intact".encode())


def test_json_is_utf_8_at_every_terminal(snowman: Path) -> None:
    done = in_ascii("verify", snowman, "--json")
    assert json.loads(done.stdout.decode("utf-8"))["artifact"] == str(snowman)


def test_json_escapes_what_utf_8_lacks(compiled: Compiled, tmp_path: Path) -> None:
    path = tmp_path / "a\u2603\udcff.kvg"
    path.symlink_to(compiled("tiny-llama"))
    done = subprocess.run([*COMMAND, "verify", path, "--json"], capture_output=True, timeout=180)
    assert (done.returncode, done.stderr) == (0, b"")
    assert json.loads(done.stdout.decode("utf-8"))["artifact"] == str(path)


@pytest.mark.parametrize(
    ("encoding", "errors", "expected"),
    [
        ("ascii", "strict", b"a?"),
        ("latin-1", "surrogateescape", b"a?"),
        ("utf-8", "surrogateescape", b"a\xe2\x98\x83"),
        ("ascii", "backslashreplace", b"a\\u2603"),
    ],
)
def test_streams_take_all_text(
    encoding: str, errors: str, expected: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding, errors))
    cli._open_streams()
    sys.stdout.write("a\u2603")
    sys.stdout.flush()
    assert written.getvalue() == expected


def in_locale(
    name: str, *arguments: str | bytes, **given: Any
) -> subprocess.CompletedProcess[bytes]:
    environment = os.environ | {"LC_ALL": name, "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    command = [*COMMAND, *arguments]
    return subprocess.run(command, capture_output=True, env=environment, timeout=180, **given)


@pytest.mark.parametrize("ends", ["", "\u2603"])
def test_text_is_the_same_in_every_locale(ends: str, compiled: Compiled) -> None:
    model = str(compiled("tiny-llama"))
    arguments = ["generate", model, "a\u2603\xe9", "--max-new-tokens", "3", "--json"]
    arguments += ["--stop", ends] if ends else []
    given = [one.encode() for one in arguments]
    expected, done = (in_locale(name, *given) for name in ("C.UTF-8", "C"))
    assert (done.returncode, done.stderr) == (0, b"")
    found, other = json.loads(done.stdout), json.loads(expected.stdout)
    assert found["token_ids"] == other["token_ids"]
    assert found["prompt_tokens"] == other["prompt_tokens"]


def test_a_chat_takes_text_in_every_locale(compiled: Compiled) -> None:
    arguments = ["chat", str(compiled("tiny-llama")), "--system", "\xe9", "--max-new-tokens", "1"]
    given = [one.encode() for one in arguments]
    done = in_locale("C", *given, input="\u2603\n".encode())
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("command", "option"),
    [
        (("generate", b"\xff"), "prompt"),
        (("generate", b"a", "--stop", b"\xff"), "--stop"),
        (("chat", "--system", b"\xff"), "--system"),
        (("serve", "--kv-events-topic", b"\xff"), "--kv-events-topic"),
    ],
)
@pytest.mark.parametrize("name", ["C", "C.UTF-8"])
def test_bytes_that_are_no_text(
    name: str, command: tuple[str | bytes, ...], option: str, compiled: Compiled
) -> None:
    done = in_locale(name, command[0], str(compiled("tiny-llama")), *command[1:])
    sentence = f"kvgraph: {option}: expected text in UTF-8, got 'utf-8' codec can't decode byte"
    assert done.stderr.startswith(sentence.encode())
    assert (done.returncode, done.stderr.count(b"\n")) == (2, 1)


def test_a_reader_of_json_that_has_left_sees_no_traceback(compiled: Compiled) -> None:
    command = [*COMMAND, "verify", str(compiled("tiny-llama")), "--json"]
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONUNBUFFERED"}
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment
    ) as running:
        assert running.stdout is not None
        assert running.stderr is not None
        running.stdout.close()
        assert running.stderr.read() == b""
        assert running.wait() == 1


def test_a_log_without_a_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", None)
    log.write_line({"event": "ready"})


LOST = """
import os, time, weakref
from kvgraph.cli.console import terminable

class Module: ...

module = Module()
seen = weakref.ref(module, lambda gone: os.kill(os.getpid(), {number}))
with terminable():
    del module
    time.sleep(120)
"""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, -2), (signal.SIGTERM, 143)])
def test_a_signal_in_a_callback_is_not_lost(number: int, code: int) -> None:
    """As one that meets a callback of Python's import, where exceptions are ignored."""
    program = LOST.format(number=int(number))
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=60)
    assert ended.returncode == code


REPLACED = """
import os
from kvgraph.cli.console import terminable

with terminable():
    try:
        os.kill(os.getpid(), {number})
        [each for each in range(9)]
    except BaseException:
        pass
    raise TypeError("expected a message argument")
"""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, -2), (signal.SIGTERM, 143)])
def test_a_signal_whose_exception_is_replaced_is_not_lost(number: int, code: int) -> None:
    """As one that comes while Python formats the message of an ImportError."""
    program = REPLACED.format(number=int(number))
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=60)
    assert ended.returncode == code


IMPORTING = """
import os, signal, sys

class Interrupted:
    def find_spec(self, name, *where):
        if name == "kvgraph.cli.verify":
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupted())
from kvgraph.__main__ import main
main()
"""


def test_an_interrupt_of_the_first_imports_says_nothing() -> None:
    command = [sys.executable, "-c", IMPORTING, "--version"]
    ended = subprocess.run(command, capture_output=True, timeout=60)
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, b"", b"")


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("options", [(), ("--json",)])
def test_a_full_disk_behind_stdout(
    options: tuple[str, ...], unbuffered: str, compiled: Compiled
) -> None:
    command = [*COMMAND, "inspect", str(compiled("tiny-llama")), *options]
    environment = os.environ | {"PYTHONUNBUFFERED": unbuffered}
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            command, stdout=full, stderr=subprocess.PIPE, env=environment, text=True, timeout=60
        )
    said = "stdout: expected to write all of it, got 'No space left on device'"
    assert (done.returncode, done.stderr) == (2, f"kvgraph: {said}\n")


BENCH = """
from kvgraph.bench import limits, run
from kvgraph.cli import main

reading = limits.Limits(1.0, 1, [])
run.read_limits = lambda threads, size: reading
main()
"""


def test_a_bench_that_is_terminated_takes_its_worker_with_it(
    compiled: Compiled, tmp_path: Path
) -> None:
    command = [sys.executable, "-c", BENCH, "bench", str(compiled("tiny-llama")), "--threads", "1"]
    process = subprocess.Popen(
        command, env=os.environ | {"TMPDIR": str(tmp_path)}, stderr=subprocess.DEVNULL
    )
    while process.poll() is None and not workers(tmp_path):
        time.sleep(0.01)
    time.sleep(0.2)  # then Popen has returned
    process.terminate()
    assert process.wait(60) == 128 + signal.SIGTERM
    assert workers(tmp_path) == []
    assert list(tmp_path.iterdir()) == []


def workers(folder: Path) -> list[str]:
    """Processes that were given a file in `folder`."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):  # it has ended
            if f"{folder}/kvgraph-bench." in (line := path.read_text(errors="replace")):
                found.append(line)
    return found


VERIFY = """
import time
from kvgraph.cli import main
from kvgraph.kernels import execute, stored

stored.read_kernels = lambda folder: []
execute.run_task, execute.tasks_of = time.sleep, lambda kernels: [600, 600]
main()
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_verify_that_is_ended_takes_its_workers_with_it(
    number: signal.Signals, compiled: Compiled, tmp_path: Path
) -> None:
    command = [sys.executable, "-c", VERIFY, "verify", str(compiled("tiny-llama")), "--execute"]
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=log, start_new_session=True
        )
    while process.poll() is None and len(session(process.pid)) < 4:  # one of them is Python's
        time.sleep(0.01)
    if number == signal.SIGINT:  # as a terminal sends it
        os.killpg(process.pid, number)
    else:
        process.send_signal(number)
    codes = {signal.SIGTERM: 143, signal.SIGINT: 130, signal.SIGKILL: -9}
    assert process.wait(60) == codes[number]
    latest = time.monotonic() + 60
    while session(process.pid) and time.monotonic() < latest:
        time.sleep(0.01)
    left = session(process.pid)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert left == []
    if number != signal.SIGKILL:  # then a process may find that its pipe is closed
        assert "Traceback" not in (tmp_path / "log").read_text()


STARTED = """
import os, signal
from multiprocessing import util

start = util.spawnv_passfds

def then_end(path, command, files):
    process = start(path, command, files)
    if "spawn_main" in str(command):
        os.kill(os.getpid(), signal.SIGTERM)
    return process

util.spawnv_passfds = then_end
"""


def test_a_verify_that_is_ended_while_a_worker_starts_says_nothing(compiled: Compiled) -> None:
    """The worker was not yet told what to do."""
    arguments = ["verify", str(compiled("tiny-llama")), "--execute"]
    ended = subprocess.run(
        [sys.executable, "-c", STARTED + VERIFY, *arguments], capture_output=True, timeout=60
    )
    assert ended.returncode == 143
    assert b"Traceback" not in ended.stderr


def session(leader: int) -> list[int]:
    """Processes of its session that have not ended."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has ended
            state, _, _, owner = path.read_text(errors="replace").rpartition(")")[2].split()[:4]
            if int(owner) == leader and state != "Z":
                found.append(int(path.parent.name))
    return found


PREFILL = """
import os, time
from kvgraph.cli import main

os.fsync = lambda file: time.sleep(60)
main()
"""


def test_a_prefill_that_is_terminated_leaves_no_half_file(
    compiled: Compiled, tmp_path: Path
) -> None:
    prompt = tmp_path / "prompt.txt"
    prompt.write_text("The import statement " * 20)
    command = [sys.executable, "-c", PREFILL, "prefill", str(compiled("tiny-llama", page_size=16))]
    command += ["--prompt-file", str(prompt), "-o", str(tmp_path / "a.kvp")]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    while process.poll() is None and not list(tmp_path.glob(".kvgraph-*.partial")):
        time.sleep(0.01)
    process.terminate()
    assert process.wait(60) == 128 + signal.SIGTERM
    assert list(tmp_path.iterdir()) == [prompt]
