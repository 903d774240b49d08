"""Slots of sequences: the bookkeeping of a cache without pages."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from numbers import Integral

from kvgraph.contract.values import as_integer, require_integer
from kvgraph.errors import CapacityError, RequestError, UnsupportedError
from kvgraph.kv.requests import RequestID, at_replica, require_key, require_unclaimed


class Slots:
    """Slots `[0, count)` of each replica; a sequence has one from its claim to its release.

    If a slot is claimed by number, the number is the id of its sequence. A call that fails changes
    nothing.
    """

    def __init__(self, count: int, num_replicas: int) -> None:
        self._count = count
        self._free = [set(range(count)) for _ in range(num_replicas)]
        self._claimed: dict[RequestID, tuple[int, int]] = {}  # id -> (replica, slot)

    def free(self, replica_idx: int, call: str) -> set[int]:
        """The free slots of a replica; a copy."""
        return set(at_replica(self._free, replica_idx, call))

    def unnamed(self, replica_idx: int, call: str) -> set[int]:
        """Free slots of a replica whose numbers are not ids of claimed sequences."""
        return self.free(replica_idx, call) - self._claimed.keys()

    def replica_of(self, request_id: RequestID) -> int | None:
        """Index of the replica on which the sequence is claimed; None if it is not claimed."""
        require_key(request_id)
        return self._claimed.get(request_id, (None, 0))[0]

    def claim(self, request_id: RequestID, replica_idx: int) -> None:
        """Claim the lowest free slot. RequestError if the sequence is claimed already,
        CapacityError if no slot is free."""
        free = at_replica(self._free, replica_idx, "claim")
        require_unclaimed(request_id, self.replica_of(request_id))
        if not free:
            raise CapacityError(
                f"claim of {request_id!r}: expected a free row among the max_batch_size="
                f"{self._count} of replica {replica_idx}, got none"
            )
        slot = min(free)
        free.remove(slot)
        self._claimed[request_id] = (replica_idx, slot)

    def claim_numbers(self, seq_ids: Sequence[int], replica_idx: int) -> None:
        """Claim the slots with these numbers: all, or none with RequestError."""
        require_numbers(seq_ids, self.unnamed(replica_idx, "external_claim"))
        self._free[replica_idx].difference_update(seq_ids)
        self._claimed.update((seq_id, (replica_idx, seq_id)) for seq_id in seq_ids)

    def release(self, request_id: RequestID, replica_idx: int) -> None:
        slot = self.slot_of(request_id, replica_idx, "release")
        del self._claimed[request_id]
        self._free[replica_idx].add(slot)

    def slot_of(self, request_id: RequestID, replica_idx: int, call: str) -> int:
        """The sequence's slot; RequestError if it is not claimed on this replica."""
        at_replica(self._free, replica_idx, call)
        require_key(request_id)
        replica, slot = self._claimed.get(request_id, (None, 0))
        if replica != replica_idx:
            other = "not claimed" if replica is None else f"claimed on replica {replica}"
            raise RequestError(
                f"{call} of {request_id!r}: expected a request claimed on replica {replica_idx}, "
                f"got one that is {other}"
            )
        return slot


def no_slots(manager: object) -> UnsupportedError:
    return UnsupportedError(
        f"slots: expected a manager with one for each sequence, got {type(manager).__name__}; "
        "claim a request by its id"
    )


def lowest(n: int, free: Collection[int]) -> list[int]:
    """The `n` lowest free slots; RequestError if n < 1, CapacityError if fewer are free."""
    n = require_integer("claim_slots", n, RequestError, least=1)
    if n > len(free):
        raise CapacityError(f"claim_slots: expected {n} free slots, got {len(free)}")
    return sorted(free)[:n]


def require_numbers(seq_ids: Sequence[int], free: set[int]) -> None:
    """Raise RequestError unless the numbers name different free slots."""
    numbers = [as_integer(seq_id) for seq_id in seq_ids]  # None for a value that is no integer
    if len(set(numbers)) < len(numbers) or not free.issuperset(numbers):
        raise RequestError(
            f"external_claim: expected different free slots of {sorted(free)}, got {list(seq_ids)}"
        )


def require_name(request_id: RequestID) -> None:
    """Raise RequestError for a number: the caller may mean `claim_slots(n)`."""
    if isinstance(request_id, Integral):
        raise RequestError(
            f"claim: expected the id of a request, got the number {request_id}; "
            f"claim_slots({request_id}) claims {request_id} slots"
        )
