"""Plot of decode throughput over batch and over context, as an SVG or PNG picture."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from kvgraph.bench.figures import Figure
from kvgraph.bench.run import Report
from kvgraph.contract.files import replacing, require_replaceable
from kvgraph.contract.loading import require_package
from kvgraph.errors import RequestError
from kvgraph.plural import plural

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SUFFIXES = {".svg": "Creator", ".png": "Software"}
"""Suffixes of files, and the metadata field of each for the program that made it."""

MAKER = "kvgraph bench"


def check_plot(path: Path) -> None:
    """Raise RequestError for another suffix, or a file that is not from an earlier run, and
    MissingDependencyError without matplotlib."""
    if path.suffix not in SUFFIXES:
        raise RequestError(f"plot: expected a file {' or '.join(SUFFIXES)}, got {path}")
    require_replaceable(path, _is_picture, "an earlier picture of kvgraph bench")
    require_package("matplotlib", "needed for --plot", "pip install 'kvgraph[bench]'")


def write_plot(report: Report, path: Path) -> None:
    """Write a picture of two panels with one line per engine: decode over batch at one prompt
    length, and decode over context at one batch."""
    from matplotlib.figure import Figure as Picture

    settings, cases = report.plan.settings, {case.name: case for case in report.plan.cases}
    decode = [figure for figure in report.figures if figure.what == "decode"]
    most = max(settings.batches)
    by_batch = [f for f in decode if cases[f.case].kind == "batch"]
    by_context = [f for f in decode if cases[f.case].batch == most]
    picture = Picture(figsize=(11, 4.6), layout="constrained")
    left, right = picture.subplots(1, 2)
    engines = list(dict.fromkeys(figure.engine for figure in decode))
    _panel(left, by_batch, engines, lambda figure: cases[figure.case].batch)
    left.set(xlabel="batch", title=f"prompts of {settings.prompt} tokens")
    _panel(right, by_context, engines, lambda figure: cases[figure.case].lengths[0])
    right.set(xlabel="tokens of prompt", title=f"batch {most}")
    left.set_ylabel("decode, tokens/s (median)")
    picture.suptitle(
        f"Decode throughput: {settings.new_tokens} new tokens, "
        f"{settings.threads} {plural('thread', settings.threads)}, "
        f"{report.machine['processor']}"
    )
    handles, labels = left.get_legend_handles_labels()
    if handles:
        picture.legend(handles, labels, loc="outside right center", frameon=False)
    about = {SUFFIXES[path.suffix]: MAKER}
    with replacing(path) as file:
        picture.savefig(file, format=path.suffix.removeprefix("."), dpi=150, metadata=about)


def _is_picture(path: Path) -> bool:
    with path.open("rb") as file:
        return MAKER.encode() in file.read(1 << 16)


def _panel(
    axes: Axes,
    figures: Sequence[Figure],
    engines: Sequence[str],
    position: Callable[[Figure], int],
) -> None:
    ticks = sorted({position(figure) for figure in figures})
    for index, engine in enumerate(engines):
        points = sorted(
            (position(f), f.tokens_per_s, f.ours, f.precision, f.pool_dtype)
            for f in figures
            if f.engine == engine and f.tokens_per_s
        )
        if not points:
            continue
        _, _, ours, precision, pool = points[0]
        axes.plot(
            [point[0] for point in points],
            [point[1] for point in points],
            color=f"C{index % 10}",
            linestyle="-" if ours else "--",
            marker="o",
            linewidth=2.2 if ours else 1.4,
            label=f"{engine}\n{precision} weights, {pool} pool",
        )
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    axes.set_xticks([], minor=True)
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
