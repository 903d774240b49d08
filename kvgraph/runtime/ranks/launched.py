"""Launched: this process's rank, read from the environment that torchrun sets."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from kvgraph.errors import RankError


@dataclass(frozen=True)
class Launched:
    """One of `size` processes that torchrun started."""

    rank: int
    size: int
    run: str
    """Identity of the run: equal in all its processes, and unique among concurrent runs."""
    here: int | None = None
    """Number of these processes on this machine; None: all."""
    address: str = ""
    port: int = 0
    """Address and port of the run's store, on rank 0's machine. They and `here` are only given for
    several machines."""
    is_store_there: bool = False
    """Whether torchrun's agent has it; else rank 0 starts it."""
    local_rank: int | None = None
    """Rank among the processes of this machine, if torchrun gives it."""

    def missing(self, ranks: list[int], seconds: float) -> RankError:
        """The error for `ranks` that did not join within `seconds`."""
        return RankError(
            f"ranks: expected {self.size} to join within {seconds:g} s, ranks {ranks} are missing"
        )

    @property
    def is_on_one_machine(self) -> bool:
        return self.here is None

    @property
    def is_beside_rank_0(self) -> bool:
        """Whether rank 0 is on this machine, so that a signal to torchrun reaches both processes.

        torchrun numbers ranks from rank 0's machine on."""
        return self.is_on_one_machine or self.local_rank == self.rank


def launched(environment: Mapping[str, str] | None = None) -> Launched | None:
    """This process's rank; None if torchrun did not start it, or started one process only.

    RankError for an environment that contradicts itself.
    """
    given = os.environ if environment is None else environment
    if "WORLD_SIZE" not in given or "RANK" not in given:
        return None
    rank, size = _integer(given, "RANK"), _integer(given, "WORLD_SIZE")
    here = _integer(given, "LOCAL_WORLD_SIZE") if "LOCAL_WORLD_SIZE" in given else size
    if size < 1:
        raise RankError(f"WORLD_SIZE: expected 1 or more from torchrun, got {size}")
    if not 0 <= rank < size:
        raise RankError(f"RANK: expected 0 to {size - 1} of WORLD_SIZE {size}, got {rank}")
    if not 1 <= here <= size:
        raise RankError(f"LOCAL_WORLD_SIZE: expected 1 to {size} of WORLD_SIZE {size}, got {here}")
    if size == 1:
        return None
    names = ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT")
    run = "/".join(given.get(name, "") for name in names)
    if here == size:
        return Launched(rank, size, run)
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        if name not in given:
            raise RankError(
                f"{name}: expected torchrun to set it for ranks on several machines, got none"
            )
    port = _integer(given, "MASTER_PORT")
    if not 1 <= port < 1 << 16:
        raise RankError(f"MASTER_PORT: expected 1 to 65535 from torchrun, got {port}")
    has_agent = given.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    local = _integer(given, "LOCAL_RANK") if "LOCAL_RANK" in given else None
    return Launched(rank, size, run, here, given["MASTER_ADDR"], port, has_agent, local)


def _integer(given: Mapping[str, str], name: str) -> int:
    try:
        return int(given[name])
    except ValueError as error:
        raise RankError(f"{name}: expected a number from torchrun, got {given[name]!r}") from error
