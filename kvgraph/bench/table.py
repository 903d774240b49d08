"""Print a report: figures, engines, limits. It fits 100 columns."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvgraph.bench.engines import EngineResult
from kvgraph.bench.run import Report
from kvgraph.plural import plural

GIB = 1 << 30
MIB = 1 << 20

BUSY = 0.5
"""Load average before a run above which the machine had other work."""
UNSTEADY = 1.25
"""Largest ratio of two read limits on an idle machine."""


def print_report(report: Report, console: Console) -> None:
    """Print the figures, then the engines with their start times and memory, then the limits."""
    if report.figures:
        console.print(_figures(report))
    console.print(_engines(report))
    for line in _footnotes(report):
        console.print(line)


def _figures(report: Report) -> Table:
    """Table with a section for each kind of figure: its name, then a line for each engine."""
    s = report.plan.settings
    table = _table(
        f"Tokens/s: median and best of {s.repeats}, {s.new_tokens} new tokens, {s.threads} "
        + plural("thread", s.threads)
    )
    table.add_column("engine", overflow="fold")
    table.add_column("weights", no_wrap=True)
    table.add_column("pool", no_wrap=True)
    for name in ("median", "best", "of limit"):
        table.add_column(name, justify="right", no_wrap=True)
    compared = any(not result.ours for result in report.results)
    for name in ("vs class", "vs any") if compared else ():
        table.add_column(name, justify="right", no_wrap=True)
    heading = ""
    for figure in report.figures:
        title = figure.case if figure.what == "ragged" else f"{figure.what}, {figure.case}"
        if heading != title:
            table.add_section()
            table.add_row(Text(title, style="bold"))
        ratios = (_ratio(figure.ratio), _ratio(figure.ratio_any)) if compared else ()
        table.add_row(
            f"  {figure.engine}",
            figure.precision,
            figure.pool_dtype,
            _number(figure.tokens_per_s),
            _number(figure.best_tokens_per_s),
            "" if figure.share is None else f"{figure.share:.0%}",
            *ratios,
        )
        heading = title
    return table


def _engines(report: Report) -> Table:
    table = _table("Engines")
    table.add_column("engine", overflow="fold")
    table.add_column("start s", justify="right", no_wrap=True)
    for name in ("RSS MiB", "model MiB", "pool MiB"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("what", overflow="fold")
    for result in report.results:
        counts = report.plan.counts.get(result.name)
        model = counts.file_bytes if counts else result.model_bytes
        table.add_row(
            result.name,
            f"{min(result.starts_s):.2f}" if result.starts_s else "-",
            _mib(result.peak_rss_bytes),
            _mib(model),
            _mib(result.pool_bytes),
            _what(result),
        )
        for name, case in result.cases.items():
            if case.error:
                table.add_row("", "", "", "", "", f"{name}: {case.error}")
    return table


def _what(result: EngineResult) -> str:
    if result.error:
        return f"failed: {result.error}"
    versions = ", ".join(f"{name} {version}" for name, version in result.versions.items())
    return f"{versions}; {result.settings}; pool {result.pool_dtype}"


def _footnotes(report: Report) -> list[str]:
    """Lines below the tables: definitions, limits of the machine, and doubts about the figures."""
    readings, machine = report.readings, report.machine
    reads = [each.read_gbs for each in readings]
    lines = [
        "start: process start to the first token of a 16-token prompt, the better of two "
        "processes; RSS: peak of the process that measured.",
        f"Limits: read {min(reads):.1f} to {max(reads):.1f} GB/s (a buffer of "
        f"{readings[0].read_bytes / GIB:.1f} GiB, before and after each engine); decode's share is "
        "of it, prefill's of the GEMM",
    ]
    for gemm in readings[0].gemms:
        rates = [
            other.gflops
            for each in readings
            for other in each.gemms
            if (other.dtype, other.library) == (gemm.dtype, gemm.library)
        ]
        lines.append(
            f"        {gemm.dtype} GEMM {min(rates):.0f} to {max(rates):.0f} GFLOP/s "
            f"({gemm.library})"
        )
    if readings[0].missing:
        lines.append(f"        {readings[0].missing}")
    before, after = report.loads
    count = machine["processors"]
    assert isinstance(count, int)
    lines.append(
        f"{machine['processor']}, {report.plan.settings.threads} of {count} "
        f"{plural('processor', count)}, load average {before:.2f} before and {after:.2f} after"
    )
    if before > BUSY:
        lines.append("The machine was busy before the run: these figures are not its own.")
    if max(reads) > UNSTEADY * min(reads):
        lines.append("Its read limit moved during the run: compare engines with care.")
    return lines + _doubts(report.results)


def _doubts(results: Sequence[EngineResult]) -> list[str]:
    """A line for each engine whose first token differs in every case from the first engine's of
    its class."""
    lines = []
    firsts: dict[str, tuple[str, dict[str, int]]] = {}
    for result in results:
        tokens = {name: case.first_ids[0] for name, case in result.cases.items() if case.first_ids}
        other, theirs = firsts.setdefault(result.precision, (result.name, tokens))
        shared = tokens.keys() & theirs.keys()
        if shared and all(tokens[name] != theirs[name] for name in shared):
            lines.append(
                f"{result.name} has another first token than {other} in every case: they may not "
                "run one model."
            )
    return lines


def _table(title: str) -> Table:
    return Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def _ratio(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}x"


def _mib(count: int | None) -> str:
    return "-" if count is None else f"{count / MIB:,.0f}"
