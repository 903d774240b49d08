"""Graph rewrites and checks. A rewrite reports how often it applied, and where and why it did not.
`lists.py` has the passes of each target in order.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

TABLE_BYTES = 128 << 20
"""Most bytes of one table of cosines and sines: 262144 positions of a head of 128. For a larger
table, each step computes its few rows instead."""


@dataclass
class PassReport:
    """The result of a pass: number of rewrites, and a sentence for each place without a match."""

    name: str
    applied: int = 0
    unmatched: list[str] = field(default_factory=list)


def report_of(passes: Iterable[PassReport], *names: str) -> PassReport:
    """The report of the pass with one of `names`; an empty one, without a name, if none has run."""
    return next((each for each in passes if each.name in names), PassReport(""))


@dataclass(frozen=True)
class PassOptions:
    """The options of a compile that decide which passes run."""

    is_padded: bool
    """Whether the cache's strategy is padded."""
    is_packed: bool
    """Whether linear layers have packed weights: bf16, int8, int4 or as stored."""
    ranks: int = 1
    """Number of processes that run the program together."""
