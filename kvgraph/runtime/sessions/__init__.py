"""Sessions: a loaded artifact that owns device memory and runs the graph."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvgraph.contract.backends import find_backend, imported
from kvgraph.contract.devices import Target
from kvgraph.errors import KVGraphError, UnsupportedError

if TYPE_CHECKING:
    from kvgraph.runtime.folder import ArtifactFolder
    from kvgraph.runtime.sessions.base import Session


def create(artifact: ArtifactFolder, kind: str | None, num_threads: int | None) -> Session:
    """Open session `kind` of the artifact's backend; None: the backend's default session."""
    manifest = artifact.manifest
    backend, target = find_backend(manifest.backend), Target.parse(manifest.target).kind
    runners = backend.targets[target].sessions if target in backend.targets else ()
    runner = next((each for each in runners if kind in (None, each.name)), None)
    if runner is None:
        raise UnsupportedError(
            f"session: expected one of {[each.name for each in runners]} for an artifact of "
            f"backend {backend.name!r}, got {kind!r}"
        )
    artifact.require_files()
    entry = imported(runner.entry)
    artifact.require_unchanged()  # a damaged program could end the process
    made: Session
    try:
        made = entry(artifact, num_threads) if runner.threads else entry(artifact)
    except KVGraphError:
        artifact.require_unchanged()  # if the folder changed, that is the cause
        raise
    artifact.require_unchanged()
    return made
