"""Error sentences for a command line that typer rejects: a value, option, argument or command."""

from __future__ import annotations

import typer

from kvgraph.contract.plain import JsonObject

UsageError: type[typer.BadParameter] = typer.BadParameter.__mro__[1]
"""Base class of these errors, which has no public name in typer."""

EXPECTED = {
    "greater_than_equal": "expected >= {ge}",
    "less_than_equal": "expected <= {le}",
    "int_parsing": "expected an integer",
    "float_parsing": "expected a number",
}
"""Texts for errors of pydantic, which checks values for typer, by the error's type."""


def is_help(error: typer.BadParameter) -> bool:
    """Whether the error's text is the help of a command without arguments."""
    return error.ctx is not None and error.message == error.ctx.get_help()


def sentence(error: typer.BadParameter) -> str:
    """The error as one sentence: the parameter, the expected value, and the actual value."""
    said = error.format_message().rstrip(".")
    if isinstance(error, typer.BadParameter) and error.message and error.param is not None:
        return f"{max(error.param.opts, key=len)}: {_of_value(error)}"
    path = error.ctx.command_path if error.ctx else "kvgraph"
    return f"{said[:1].lower()}{said[1:]}; {path} --help shows what it takes"


def _of_value(error: typer.BadParameter) -> str:
    """The error of a value; older versions of typer check values themselves, and name the value."""
    found: list[JsonObject] = getattr(error.__cause__, "errors", list)()
    if found and found[0]["type"] in EXPECTED:
        expected = EXPECTED[found[0]["type"]].format(**found[0].get("ctx", {}))
        return f"{expected}, got {found[0]['input']}"
    return error.message.removeprefix("Value error, ").rstrip(".")
