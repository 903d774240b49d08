"""The command line: text and JSON on stdout, all else on stderr, exit code 2 on bad input."""

from __future__ import annotations

import codecs
import os
import sys
import warnings
from io import TextIOWrapper
from typing import Annotated

import typer

from kvgraph.cli import (
    bench,
    cache,
    chat,
    compile,
    generate,
    inspect,
    plan,
    prefill,
    serve,
    verify,
    worker,
)
from kvgraph.cli.console import stderr, stdout
from kvgraph.errors import KVGraphError

app = typer.Typer(
    help="Compile language models ahead of time around a paged KV cache, and run them.",
    context_settings={"help_option_names": ["-h", "--help"]},
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
for command in (
    compile.compile,
    generate.generate,
    chat.chat,
    serve.serve,
    worker.worker,
    prefill.prefill,
    inspect.inspect,
    plan.plan,
    verify.verify,
    bench.bench,
):
    app.command()(command)
app.add_typer(cache.app, name="cache")


def main() -> None:
    """Entry point: one sentence and exit code 2 for what a user can mend."""
    _open_streams()
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _print_warning  # type: ignore[assignment]
            app()
    except (KVGraphError, OSError, MemoryError) as error:
        stderr.print(f"kvgraph: {_said(error)}", soft_wrap=True)
        sys.exit(2)


def _said(error: Exception) -> str:
    """Its sentence; Python's own MemoryError has none."""
    if isinstance(error, MemoryError) and not str(error):
        return (
            "memory: expected enough for this command on this machine, got too little; "
            "give smaller sizes, or fewer at once"
        )
    return str(error) or type(error).__name__


def _open_streams() -> None:
    """A stream that the shell has closed, as `>&-` does, gives nothing and takes all.

    What the encoding of stdout or stderr does not have is written as a question mark.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper) and _refuses_text(stream):
            stream.reconfigure(errors="replace")


def _refuses_text(stream: TextIOWrapper) -> bool:
    """Whether there is text that it raises for: stderr writes escapes, as Python opens it."""
    if stream.errors == "surrogateescape":  # the C locale's, which keeps the bytes of file names
        return codecs.lookup(stream.encoding).name != "utf-8"
    return stream.errors == "strict"


@app.callback(invoke_without_command=True)
def version(
    wanted: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    if wanted:
        from kvgraph import __version__

        stdout.print(f"kvgraph {__version__}")
        raise typer.Exit


def _print_warning(message: Warning | str, *where: object) -> None:
    stderr.print(f"warning: {message}", soft_wrap=True)
