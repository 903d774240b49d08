"""Commands whose streams the shell has closed, and signals to them."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

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
