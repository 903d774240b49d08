"""Commands under torchrun: rank 0 runs the command, the other ranks follow it."""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

from kvgraph.cli.console import terminable
from kvgraph.errors import RankError

if TYPE_CHECKING:
    from kvgraph.runtime.artifact import Artifact
    from kvgraph.runtime.ranks.launched import Launched


def follows(
    artifact: Artifact, session: str | None, threads: int | None, timeout: float | None
) -> bool:
    """Follow rank 0 if this process is a rank above 0; return whether it is.

    RankError if torchrun started another number of processes than the artifact has ranks.
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
    before = signal.getsignal(signal.SIGINT)
    with terminable():
        try:
            artifact.follow(
                session,
                num_threads=threads,
                collective_timeout=timeout,
                joined=_leave_signals_to_rank_0,
            )
        finally:
            signal.signal(signal.SIGINT, before)
    return True


def _leave_signals_to_rank_0(own: Launched) -> None:
    """Ignore signals if rank 0 is on this machine: it gets them too, and ends the other ranks."""
    if own.is_beside_rank_0:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
