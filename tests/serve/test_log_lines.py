"""Lines of a log that wait for its reader, or for the command."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import httpx
import pytest

from kvgraph.serve import held_lines, log
from kvgraph.serve.held_lines import HeldLines
from kvgraph.serve.stderr import write_text, written_behind
from tests.serve.running import COMMAND, SECONDS, TEXTS, is_ready, wait_for
from tests.support.command_line import FORKING, SMALL_PIPE
from tests.support.ports import free_port


def test_lines_that_nothing_takes_are_dropped_and_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(held_lines, "MOST_CHARACTERS", 5)
    lines = HeldLines()
    lines.add(["aa", "bb", "c"])
    assert lines.take() == ["aa", "bb", "c"]
    lines.add(["aa", "bb"])
    lines.add(["cc", "dddddddd"])
    dropped, *kept = lines.take()
    assert json.loads(dropped)["message"].startswith("log: 3 lines were dropped")
    assert kept == ["dddddddd"]
    assert lines.take() == []


def test_a_process_may_give_its_lines_away(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = HeldLines()
    monkeypatch.setattr(log._Sink, "take", None)
    log.send_lines(lambda line: lines.add([line]))
    log.log_answer("/version", 200, "one")
    assert capsys.readouterr().err == ""
    (line,) = lines.take()
    write_text(line)
    written = json.loads(capsys.readouterr().err)
    assert (written["request"], written["path"], written["status"]) == ("one", "/version", 200)


@contextmanager
def pipe() -> Iterator[tuple[int, int]]:
    """The ends of a small pipe, to read from and to write to."""
    ends = os.pipe()
    try:
        fcntl.fcntl(ends[1], fcntl.F_SETPIPE_SZ, SMALL_PIPE)
        yield ends
    finally:
        for end in ends:
            os.close(end)


def fill(end: int) -> None:
    os.set_blocking(end, False)
    while True:
        try:
            os.write(end, b"x")
        except BlockingIOError:
            break
    os.set_blocking(end, True)


def test_a_server_whose_log_is_not_read(artifact: Path) -> None:
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    with pipe() as (_, end):
        fill(end)
        command = [*COMMAND, str(artifact), "--port", str(port), "--threads", "1"]
        process = subprocess.Popen(command, stderr=end)
        try:
            with httpx.Client(base_url=url, timeout=SECONDS) as client:
                wait_for(lambda: is_ready(f"{url}/ready"), "it is not ready")
                for _ in range(3):
                    body = {"prompt": "The", "max_tokens": 2}
                    assert client.post(TEXTS, json=body).status_code == 200
                assert client.get("/health").status_code == 200
            process.terminate()
            assert process.wait(SECONDS) == 0
        finally:
            process.kill()
            process.wait()


def test_an_error_at_the_end_waits_for_no_reader() -> None:
    code = (
        "import sys; from kvgraph.serve.stderr import *\n"
        "with written_behind():\n    write_text('line')\n"
        "print('x' * 9999, file=sys.stderr); sys.exit(2)"
    )
    with pipe() as (_, end):
        fill(end)
        command = [sys.executable, "-c", code]
        assert subprocess.run(command, stderr=end, timeout=SECONDS).returncode == 2


def test_lines_that_are_read_late_keep_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [f"{number:099}" for number in range(1000)]
    with pipe() as (start, end), open(end, "w", closefd=False) as stderr:
        monkeypatch.setattr(sys, "stderr", stderr)
        with written_behind(), open(start, encoding="utf-8", closefd=False) as log:
            for line in lines:
                write_text(line)
            assert [log.readline().rstrip() for _ in lines] == lines
            os.set_blocking(end, False)  # as some parents of a process leave it
            for line in lines:
                write_text(line)
            assert [log.readline().rstrip() for _ in lines] == lines


def test_a_signal_handler_may_write_while_a_line_is_added(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    add = HeldLines.add

    def interrupted(self: HeldLines, lines: list[str]) -> None:
        if lines == ["outer"]:
            signal.raise_signal(signal.SIGUSR1)
        add(self, lines)

    def handle(number: int, frame: FrameType | None) -> None:
        write_text("inner")

    monkeypatch.setattr(HeldLines, "add", interrupted)
    before = signal.signal(signal.SIGUSR1, handle)
    try:
        with written_behind():
            write_text("outer")
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert capsys.readouterr().err == "inner\nouter\n"


def test_a_forked_process_writes_its_own_lines() -> None:
    code = (
        "import os; from kvgraph.serve.stderr import *\n"
        "with written_behind():\n"
        "    write_text('first'); child = os.fork()\n"
        "    if not child: write_text('forked'); os._exit(0)\n"
        "    os.waitpid(child, 0); write_text('last')"
    )
    done = subprocess.run([*FORKING, "-c", code], capture_output=True, text=True, timeout=SECONDS)
    assert sorted(done.stderr.splitlines()) == ["first", "forked", "last"]
