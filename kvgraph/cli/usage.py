"""Sentences for a command line that typer refuses: a value, an option, an argument, a command."""

from __future__ import annotations

import typer

from kvgraph.contract.plain import JsonObject

UsageError: type[typer.BadParameter] = typer.BadParameter.__mro__[1]
"""The root of these errors, for which typer has no public name."""

EXPECTED = {
    "greater_than_equal": "expected >= {ge}",
    "less_than_equal": "expected <= {le}",
    "int_parsing": "expected an integer",
    "float_parsing": "expected a number",
}
"""Kind of an error of pydantic, which checks values for typer -> what it says, of its context."""


def is_help(error: typer.BadParameter) -> bool:
    """Whether its text is the help of a command that got nothing."""
    return error.ctx is not None and error.message == error.ctx.get_help()


def sentence(error: typer.BadParameter) -> str:
    """What was refused, what was expected and what came."""
    said = error.format_message().rstrip(".")
    if isinstance(error, typer.BadParameter) and error.message and error.param is not None:
        return f"{max(error.param.opts, key=len)}: {_of_value(error)}"
    path = error.ctx.command_path if error.ctx else "kvgraph"
    return f"{said[:1].lower()}{said[1:]}; {path} --help shows what it takes"


def _of_value(error: typer.BadParameter) -> str:
    """Where typer checks values itself, as older versions do, its text has the value."""
    found: list[JsonObject] = getattr(error.__cause__, "errors", list)()
    if found and found[0]["type"] in EXPECTED:
        expected = EXPECTED[found[0]["type"]].format(**found[0].get("ctx", {}))
        return f"{expected}, got {found[0]['input']}"
    return error.message.removeprefix("Value error, ").rstrip(".")
