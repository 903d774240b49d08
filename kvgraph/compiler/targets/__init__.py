"""One module per backend, which writes an exported model as files into the artifact's folder."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from kvgraph.compiler.passes import PassReport
from kvgraph.contract.file_names import BUILD_LOG_NAME
from kvgraph.contract.manifest import EngineInfo
from kvgraph.contract.mixtures import Mixture


def write_build_log(folder: Path, log: Mapping[str, object]) -> None:
    """Write `build.json` into `folder`: seconds of each part of the build."""
    (folder / BUILD_LOG_NAME).write_text(json.dumps(log, indent=1) + "\n", encoding="utf-8")


@dataclass
class Lowered:
    """The result of a backend: op counts of its graph, pass reports, notes, and files that differ
    from build to build."""

    ops: dict[str, int]
    passes: list[PassReport]
    nondeterministic_files: list[str] = field(default_factory=list)
    engine: EngineInfo | None = None
    notes: list[str] = field(default_factory=list)
    mixtures: list[Mixture] = field(default_factory=list)
