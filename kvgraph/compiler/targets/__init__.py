"""One file per backend: an exported model -> files in the artifact's folder."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from kvgraph.compiler.passes import PassReport
from kvgraph.contract.manifest import EngineInfo
from kvgraph.contract.mixtures import Mixture

WEIGHTS_NAME = "weights.safetensors"

BUILD_LOG_NAME = "build.json"
"""How long the parts of this build took: never the same twice, so it is not hashed."""


def write_build_log(folder: Path, log: Mapping[str, object]) -> None:
    """Write `build.json`: seconds by what took them."""
    (folder / BUILD_LOG_NAME).write_text(json.dumps(log, indent=1) + "\n")


@dataclass
class Lowered:
    """What a backend wrote: op counts of its graph, pass reports, and what is not reproducible."""

    ops: dict[str, int]
    passes: list[PassReport]
    nondeterministic_files: list[str] = field(default_factory=list)
    engine: EngineInfo | None = None
    notes: list[str] = field(default_factory=list)
    mixtures: list[Mixture] = field(default_factory=list)
