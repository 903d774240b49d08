"""Which rank this process is: from the environment that torchrun sets."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from kvgraph.errors import RankError


@dataclass(frozen=True)
class Launched:
    """One of `size` processes that torchrun started on this machine."""

    rank: int
    size: int
    run: str
    """Equal in all of them, and in no other run at the same time."""


def launched(environment: Mapping[str, str] | None = None) -> Launched | None:
    """None in a process that torchrun did not start, or started alone.

    RankError for ranks on several machines, or an environment that contradicts itself.
    """
    given = os.environ if environment is None else environment
    if "WORLD_SIZE" not in given or "RANK" not in given:
        return None
    rank, size = _integer(given, "RANK"), _integer(given, "WORLD_SIZE")
    here = _integer(given, "LOCAL_WORLD_SIZE") if "LOCAL_WORLD_SIZE" in given else size
    if not 0 <= rank < size:
        raise RankError(f"RANK: expected 0 to {size - 1} of WORLD_SIZE {size}, got {rank}")
    if here != size:
        raise RankError(
            f"WORLD_SIZE: expected all ranks on one machine, which meet in its memory, got {size} "
            f"of which {here} are on this one"
        )
    if size == 1:
        return None
    names = ("TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RESTART_COUNT")
    return Launched(rank, size, "/".join(given.get(name, "") for name in names))


def _integer(given: Mapping[str, str], name: str) -> int:
    try:
        return int(given[name])
    except ValueError as error:
        raise RankError(f"{name}: expected a number from torchrun, got {given[name]!r}") from error
