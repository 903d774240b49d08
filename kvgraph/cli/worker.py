"""The command `kvgraph worker`."""

from __future__ import annotations

from kvgraph.cli.console import working
from kvgraph.cli.options import (
    ArtifactFolder,
    CollectiveTimeout,
    SessionName,
    Threads,
    Verify,
)
from kvgraph.cli.ranks import follows
from kvgraph.errors import RequestError


def worker(
    artifact: ArtifactFolder,
    session: SessionName = None,
    threads: Threads = None,
    collective_timeout: CollectiveTimeout = None,
    verify: Verify = False,
) -> None:
    """Follow rank 0, which runs another command: a rank above 0 of torchrun."""
    from kvgraph.runtime.artifact import load
    from kvgraph.runtime.ranks.launched import launched

    own = launched()
    if own is None or own.rank == 0:
        raise RequestError(
            "worker: expected a rank above 0 of torchrun, got "
            f"{'no torchrun' if own is None else 'rank 0'}; rank 0 runs another command"
        )
    with working("loading the artifact"):
        loaded = load(artifact, verify=verify or None)
    follows(loaded, session, threads, collective_timeout)
