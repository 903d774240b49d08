"""Commands whose streams the shell has closed."""

from __future__ import annotations

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
