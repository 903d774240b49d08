"""Graph rewrites and checks. Each says how often it applied, and why where it did not; `lists.py`
has those of each target in order.
"""

from __future__ import annotations

from dataclasses import dataclass, field

TABLE_BYTES = 128 << 20
"""Of one table of cosines and sines: 262144 positions of a head of 128. Beyond, a step computes its
few rows."""


@dataclass
class PassReport:
    """What one pass did: `applied` rewrites, and a sentence per place that did not match."""

    name: str
    applied: int = 0
    unmatched: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class PassOptions:
    """What a compile was asked for, as far as passes depend on it."""

    is_padded: bool
    """The cache's strategy is padded."""
    is_packed: bool
    """Linear layers have packed weights: bf16, int8, int4 or as stored."""
    ranks: int = 1
    """Processes that run the program together."""
