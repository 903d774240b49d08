"""Checks of what a caller passes to a manager; all raise RequestError."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar, cast

from kvgraph.errors import RequestError
from kvgraph.kv.requests import Batches, RequestID, TextContext
from kvgraph.kv.staging import MAX_STEPS

T = TypeVar("T")


def at_replica(each: Sequence[T], replica_idx: int, call: str) -> T:
    """`each[replica_idx]` of what there is one of per replica."""
    if not 0 <= replica_idx < len(each):
        hint = "; give a number of steps as num_steps=" if call == "alloc" else ""
        raise RequestError(
            f"{call}: expected replica_idx below data_parallel_degree={len(each)}, "
            f"got {replica_idx}{hint}"
        )
    return each[replica_idx]


def per_replica(batches: Batches | Sequence[TextContext], num_replicas: int, call: str) -> Batches:
    """One batch per replica; a flat list of requests is the batch of the only replica.

    An empty list is flat too where `step` gets it.
    """
    if num_replicas == 1 and (isinstance(batches[0], TextContext) if batches else call == "step"):
        return [cast(Sequence[TextContext], batches)]
    if len(batches) != num_replicas:
        raise RequestError(
            f"{call}: expected {num_replicas} replica batches (data_parallel_degree), "
            f"got {len(batches)}"
        )
    return cast(Batches, batches)


def require_unclaimed(request_id: RequestID, claimed_on: int | None) -> None:
    """`claimed_on`: the replica that the request is claimed on already, if it is."""
    if claimed_on is not None:
        raise RequestError(
            f"claim of {request_id!r}: expected a request that is not claimed, "
            f"got one claimed on replica {claimed_on} already"
        )


def require_steps(num_steps: int, lookahead: int = 0) -> int:
    """Tokens beyond the active ones, of 1 to MAX_STEPS steps."""
    if not 1 <= num_steps <= MAX_STEPS:
        raise RequestError(f"num_steps: expected 1 to {MAX_STEPS}, got {num_steps}")
    if lookahead < 0:
        raise RequestError(f"lookahead: expected >= 0, got {lookahead}")
    return num_steps - 1 + lookahead
