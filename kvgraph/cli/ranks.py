"""Commands under torchrun: rank 0 does what was asked, the others follow it."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

from kvgraph.errors import RankError

if TYPE_CHECKING:
    from kvgraph.runtime.artifact import Artifact


def follows(
    artifact: Artifact, session: str | None, threads: int | None, timeout: float | None
) -> bool:
    """Whether this process is a rank above 0, which has then done its part.

    RankError where torchrun started another number of processes than the artifact has ranks.
    """
    from kvgraph.runtime.ranks.launched import launched

    own = launched()
    if own is not None and own.size != artifact.ranks:
        raise RankError(
            f"{artifact.folder}: expected {artifact.ranks} processes, one for each of its ranks, "
            f"got {own.size} from torchrun; use --nproc-per-node {artifact.ranks}"
        )
    if own is None or own.rank == 0:
        return False
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # rank 0 gets it too, and ends the others
    artifact.follow(session, num_threads=threads, collective_timeout=timeout)
    return True
