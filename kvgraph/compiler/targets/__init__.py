"""One file per backend: an exported model -> files in the artifact's folder."""

from __future__ import annotations

from dataclasses import dataclass, field

from kvgraph.compiler.passes import PassReport


@dataclass
class Lowered:
    """What a backend wrote: op counts of its graph, pass reports, and what is not reproducible."""

    ops: dict[str, int]
    passes: list[PassReport]
    nondeterministic_files: list[str] = field(default_factory=list)
    tools: tuple[str, ...] = ()
    """Distributions whose versions decided the bytes."""
