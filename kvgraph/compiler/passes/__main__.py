"""Print the passes of each target as Markdown: `python -m kvgraph.compiler.passes`."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from kvgraph.compiler.passes.lists import PASSES, PassList


def markdown() -> str:
    """A Markdown table for each target and backend, with passes in the order in which they run."""
    parts = []
    for (kind, backend), passes in PASSES.items():
        parts += [f"## Target {kind}, backend {backend}", "\n".join(_rows(passes))]
    return "\n\n".join(parts) + "\n"


def _rows(passes: PassList) -> Iterator[str]:
    yield "| # | Pass | Kind | What it does | Left out where |"
    yield "|---:|---|---|---|---|"
    for number, each in enumerate(passes, start=1):
        kind = "check" if each.is_check else "rewrite"
        left_out = each.needs.otherwise if each.needs else ""
        yield f"| {number} | `{each.name}` | {kind} | {each.summary} | {left_out} |"


if __name__ == "__main__":
    sys.stdout.write(markdown())
