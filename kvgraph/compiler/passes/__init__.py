"""Graph rewrites, one per file. Each says how often it applied, and why where it did not."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass
class PassReport:
    """What one pass did: `applied` rewrites, and a sentence per place that did not match."""

    name: str
    applied: int = 0
    unmatched: list[str] = field(default_factory=list)
