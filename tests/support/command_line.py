"""Runs the command line, in this process (fast) or as a user's shell does (`COMMAND`)."""

from __future__ import annotations

import contextlib
import io
import sys
from typing import Any, NamedTuple
from unittest import mock

import pytest

from kvgraph import cli

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
