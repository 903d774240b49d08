"""The command line: text and JSON on stdout, all else on stderr, exit code 2 on bad input."""

from __future__ import annotations

import codecs
import errno
import os
import stat
import sys
import warnings
from io import TextIOWrapper
from typing import Annotated, TextIO

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
from kvgraph.cli.usage import UsageError, is_help, sentence
from kvgraph.contract.files import NO_ROOM
from kvgraph.contract.loading import next_step, with_step
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
    """Run a command. For a user's error, print one sentence and exit with code 2."""
    _open_streams()
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _print_warning  # type: ignore[assignment]
            code: int | None = app(prog_name="kvgraph", standalone_mode=False)
    except UsageError as error:
        if is_help(error):
            typer.echo(error.message, err=True)
        else:
            stderr.print(f"kvgraph: {sentence(error)}", soft_wrap=True)
        sys.exit(2)
    except (KVGraphError, OSError, MemoryError) as error:
        stderr.print(f"kvgraph: {_said(error)}", soft_wrap=True)
        sys.exit(2)
    except ImportError as error:
        if not next_step(str(error), ""):
            raise
        stderr.print(f"kvgraph: {with_step(str(error), str(error))}", soft_wrap=True)
        sys.exit(2)
    except typer.Abort:
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)
    sys.exit(code or 0)


FILTERS = "see the filters of system calls and the capabilities of this process"


def _said(error: Exception) -> str:
    """The error's message; Python's own memory and file errors get a sentence."""
    if isinstance(error, MemoryError) and not str(error):
        return (
            "memory: expected enough for this command on this machine, got too little; "
            "give smaller sizes, or fewer at once"
        )
    if isinstance(error, OSError) and not isinstance(error, KVGraphError):
        if error.filename is not None:
            path = os.fsdecode(error.filename)
            said = f"{path}: expected a path that can be used, got {error.strerror!r}"
            return with_step(said, error.strerror or "")
        if error.errno in NO_ROOM and _is_full(sys.stdout):
            return f"stdout: expected to write all of it, got {error.strerror!r}"
        if error.strerror is not None:
            said = f"system: expected a call of this command to succeed, got {error.strerror!r}"
            is_refused = error.errno in (errno.EPERM, errno.ENOSYS)
            return f"{said}; {FILTERS}" if is_refused else with_step(said, error.strerror)
    return str(error) or type(error).__name__


def _is_full(stream: TextIO) -> bool:
    """Whether no more can be written to a file or device. If so, its buffered output is dropped."""
    try:
        if stream.isatty() or stat.S_ISFIFO(os.fstat(stream.fileno()).st_mode):
            return False
        stream.write("\n")
        stream.flush()
    except OSError:
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, stream.fileno())
        os.close(nothing)
        return True
    return False


def _open_streams() -> None:
    """Open closed standard streams (`>&-`) on the null device, and make encoding errors harmless.

    Characters that stdout or stderr cannot encode are written as question marks. In the C locale,
    stdin is read as UTF-8.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper) and _refuses_text(stream):
            stream.reconfigure(errors="replace")
    stdin = sys.stdin
    if isinstance(stdin, TextIOWrapper) and stdin.errors == "surrogateescape":
        stdin.reconfigure(encoding="utf-8", errors="strict")


def _refuses_text(stream: TextIOWrapper) -> bool:
    """Whether some text raises on write. stderr never does: Python opens it with escapes."""
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
