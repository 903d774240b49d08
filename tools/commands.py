"""`docs/commands.md`: the help of every command of the command line."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import typer
from typer.testing import CliRunner

from kvgraph import cli

PAGE = Path(__file__).parents[1] / "docs" / "commands.md"
HEAD = """\
# Commands

What `kvgraph COMMAND --help` prints; `make generate` writes this page.
"""


def page() -> str:
    return HEAD + "".join(_section(names) for names in _names(typer.main.get_command(cli.app)))


def _names(command: object, *above: str) -> Iterator[tuple[str, ...]]:
    """Of each command; one of a group has the group's name before its own."""
    for name, each in getattr(command, "commands", {}).items():
        yield from _names(each, *above, name) if hasattr(each, "commands") else [(*above, name)]


def _section(names: tuple[str, ...]) -> str:
    width = {"COLUMNS": "80", "TERMINAL_WIDTH": "80"}
    shown = CliRunner().invoke(cli.app, [*names, "--help"], env=width, prog_name="kvgraph")
    return f"\n## {' '.join(names)}\n\n```text\n{shown.output.strip()}\n```\n"
