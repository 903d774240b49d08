"""The command `kvgraph bench`: its options, and the order of its steps."""

from __future__ import annotations

import os
import sys
import threading
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from kvgraph.cli.console import stderr, terminable, write_json
from kvgraph.cli.options import Json, named
from kvgraph.contract.files import replacing, require_replaceable
from kvgraph.contract.leftovers import making, scratch
from kvgraph.contract.plain import to_json
from kvgraph.errors import RequestError

if TYPE_CHECKING:
    from kvgraph.bench.protocol import Settings
    from kvgraph.bench.run import Report

WIDTH = 100
"""Columns of the output if stdout is not a terminal."""


def bench(
    artifacts: Annotated[
        list[Path],
        typer.Argument(
            metavar="DIR...", parser=named, help="Artifact folders of one model, for cpu."
        ),
    ],
    peers: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME[:CLASS[+CLASS]]=PYTHON",
            help="Another engine, in the interpreter that has it; CLASS is fp32, bf16, int8 or "
            "int4 [default: the artifacts']. May be repeated.",
        ),
    ] = None,
    model: Annotated[
        Path | None,
        typer.Option(
            metavar="MODEL_DIR", parser=named, help="Hugging Face checkpoint for --peers."
        ),
    ] = None,
    peer_models: Annotated[
        Path | None,
        typer.Option(
            metavar="<path>",
            parser=named,
            help="Where peers keep the model in their formats [default: for this run].",
        ),
    ] = None,
    threads: Annotated[
        int | None, typer.Option(help="CPU threads [default: one for each physical core].")
    ] = None,
    batches: Annotated[str | None, typer.Option(help="Rows at once [default: 1,8].")] = None,
    prompt: Annotated[int | None, typer.Option(help="Tokens of a prompt [default: 512].")] = None,
    new_tokens: Annotated[
        int | None, typer.Option(help="New tokens of a row [default: 128].")
    ] = None,
    context: Annotated[
        str | None,
        typer.Option(help="Longer and shorter prompts, at the largest batch [default: 128,1024]."),
    ] = None,
    requests: Annotated[
        int | None, typer.Option(help="Ragged requests together; 0: none [default: 32].")
    ] = None,
    repeats: Annotated[
        int | None, typer.Option(help="Runs, of which the median is taken [default: 3].")
    ] = None,
    quick: Annotated[
        bool,
        typer.Option(
            "--quick", help="Small defaults for a look: prompt 64, 16 new tokens, 5 repeats."
        ),
    ] = False,
    step_tokens: Annotated[
        int | None, typer.Option(help="Most new tokens of a step [default: 4096].")
    ] = None,
    prefix_caching: Annotated[
        bool,
        typer.Option(
            "--prefix-caching", help="Compute each prompt once: decode alone, behind long prompts."
        ),
    ] = False,
    timeout: Annotated[float, typer.Option(help="Seconds that an engine's process has.")] = 3600.0,
    save: Annotated[
        Path | None, typer.Option(metavar="<path>", parser=named, help="JSON file to write.")
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(metavar="<path>", parser=named, help="Picture to write: .svg or .png."),
    ] = None,
    json: Json = False,
) -> None:
    """Measure artifacts and other engines against the machine's limits."""
    from kvgraph.bench.plan import make_plan
    from kvgraph.bench.plot import check_plot
    from kvgraph.bench.run import is_report, run

    settings = make_settings(
        quick,
        threads,
        prompt=prompt,
        new_tokens=new_tokens,
        batches=_integers("batches", batches),
        contexts=_integers("context", context),
        requests=requests,
        repeats=repeats,
        step_tokens=step_tokens,
        prefix_caching=prefix_caching,
    )
    _require_seconds(timeout)
    if save is not None and plot is not None and os.path.realpath(save) == os.path.realpath(plot):
        raise RequestError(f"--plot: expected another file than that of --save, got {plot}")
    if save is not None:
        require_replaceable(save, is_report, "an earlier report of kvgraph bench")
    if plot is not None:
        check_plot(plot)
    with terminable(), ExitStack() as stack:
        work = peer_models or stack.enter_context(scratch("bench-models"))
        try:
            stack.enter_context(making(work))
        except OSError as error:
            raise RequestError(
                f"--peer-models: expected a folder at {work}, or a place to make it, got "
                f"{error.strerror!r}"
            ) from error
        plan = make_plan(artifacts, settings, peers=peers or [], model=model, work=work)
        start = time.perf_counter()
        status = stack.enter_context(stderr.status(""))

        def show(stage: str) -> None:
            stderr.print(f"{time.perf_counter() - start:8.1f} s  {stage}", soft_wrap=True)
            status.update(stage)

        report = run(plan, timeout=timeout, progress=show)
    with terminable():
        _tell(report, json=json, save=save, plot=plot)
    _exit(report)


def _tell(report: Report, *, json: bool, save: Path | None, plot: Path | None) -> None:
    """Print, save and draw the report; each even if another one fails."""
    from kvgraph.bench.plot import write_plot
    from kvgraph.bench.run import report_data
    from kvgraph.bench.table import print_report

    data = to_json(report_data(report), indent=1, errors="backslashreplace") + b"\n"
    try:
        if json:
            write_json(data)
        else:
            width = None if sys.stdout.isatty() else WIDTH
            print_report(report, Console(width=width, highlight=False, markup=False, emoji=False))
    finally:
        try:
            if save is not None:
                with replacing(save) as file:
                    file.write(data)
        finally:
            if plot is not None:
                write_plot(report, plot)


def make_settings(quick: bool, threads: int | None, **given: Any) -> Settings:
    """Settings: `given` values that are not None, else defaults. RequestError names a bad field."""
    from kvgraph.bench.machine import check_threads
    from kvgraph.bench.protocol import QUICK, Settings

    defaults = Settings(threads=check_threads(threads), **(QUICK if quick else {}))
    return replace(defaults, **{name: value for name, value in given.items() if value is not None})


def _require_seconds(timeout: float) -> None:
    """Raise RequestError for a timeout that is out of range."""
    if not 0 < timeout <= threading.TIMEOUT_MAX:  # false for NaN too
        raise RequestError(
            f"timeout: expected more than 0 and at most {threading.TIMEOUT_MAX:.0f} seconds, "
            f"got {timeout:g}"
        )


def _integers(name: str, text: str | None) -> tuple[int, ...] | None:
    """Parse "1,8" to (1, 8); empty parts are skipped."""
    if text is None:
        return None
    try:
        return tuple(int(part) for part in text.split(",") if part.strip())
    except ValueError as error:
        raise RequestError(f"{name}: expected numbers such as 1,8, got {text!r}") from error


def _exit(report: Report) -> None:
    """Exit with code 1 if an artifact could not be measured; its line has the reason."""
    if report.failed:
        raise typer.Exit(1)
