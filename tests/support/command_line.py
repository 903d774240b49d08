"""Runs the command line, in this process (fast) or as a user's shell does (`COMMAND`)."""

from __future__ import annotations

import contextlib
import fcntl
import io
import os
import subprocess
import sys
from typing import Any, NamedTuple
from unittest import mock

import pytest

from kvgraph import cli

FORKING = [sys.executable, "-W", "ignore:This process:DeprecationWarning"]
"""Python, which warns of each fork of a process with threads from 3.12 on."""

COMMAND = [sys.executable, "-c", "from kvgraph.cli import main; main()"]


class Outcome(NamedTuple):
    code: Any
    out: str
    err: str


def run(*arguments: Any) -> Outcome:
    """The command line in this process."""
    out, err = io.StringIO(), io.StringIO()
    with (
        mock.patch.object(sys, "argv", ["kvgraph", *map(str, arguments)]),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        pytest.raises(SystemExit) as stop,
    ):
        cli.main()
    return Outcome(stop.value.code, out.getvalue(), err.getvalue())


SMALL_PIPE = 4096
"""Bytes that a process writes before somebody reads them."""


def wait_until_it_writes(process: subprocess.Popen[str]) -> None:
    """To stdout, of which a byte is read: it does not end before the rest is read too."""
    assert process.stdout is not None
    fcntl.fcntl(process.stdout, fcntl.F_SETPIPE_SZ, SMALL_PIPE)
    assert os.read(process.stdout.fileno(), 1), "it ended"
