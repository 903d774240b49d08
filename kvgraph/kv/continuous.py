"""Continuous batching without pages: one slot of `max_seq_len` tokens per sequence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from kvgraph.contract.devices import Device
from kvgraph.contract.inputs import Session
from kvgraph.contract.params import KVCacheParams, KVCacheStrategy
from kvgraph.errors import CapacityError, RequestError, UnsupportedError
from kvgraph.kv.leaf import require_params
from kvgraph.kv.paged import PagedKVCacheManager
from kvgraph.kv.pages import PagePool
from kvgraph.kv.requests import RequestID


class ContinuousBatchingKVCacheManager(PagedKVCacheManager):
    """A paged manager whose page is the slot of a whole sequence, taken at claim.

    Each replica has `max_batch_size` slots and the null slot. `num_layers` and `devices` win over
    those of `params`. UnsupportedError for prefix caching (no slot can be shared) and for
    quantised pools.
    """

    def __init__(
        self,
        params: KVCacheParams,
        max_batch_size: int,
        max_seq_len: int,
        num_layers: int,
        devices: Sequence[Device],
        session: Session | None,
        enable_runtime_checks: bool = False,
    ) -> None:
        _require_supported(params)
        own = replace(
            params,
            num_layers=num_layers,
            devices=tuple(devices),
            cache_strategy=KVCacheStrategy.CONTINUOUS,
        )
        require_params(session, own)
        slots = replace(own, page_size=max_seq_len, window_size=None)  # a slot is never freed early
        super().__init__(
            slots,
            session,
            max_batch_size,
            enable_runtime_checks=enable_runtime_checks,
            max_batch_size=max_batch_size,
            max_seq_len=max_seq_len,
        )
        self.params = own
        self.max_seq_len = max_seq_len

    def claim(self, request_id: RequestID, replica_idx: int = 0) -> None:
        """Pin a request to a free slot."""
        self._replica_to_claim(request_id, replica_idx)
        self._claim_slot(request_id, replica_idx, None)

    def claim_slots(self, n: int, replica_idx: int = 0) -> list[int]:
        """Claim `n` free slots; each slot's number is the id of its sequence.

        CapacityError if fewer are free, RequestError if n < 1.
        """
        free = [s for s in self._pool(replica_idx).free_pages() if s not in self._claimed]
        if n < 1:
            raise RequestError(f"claim_slots: expected n >= 1, got {n}")
        if n > len(free):
            raise CapacityError(f"claim_slots: expected {n} free slots, got {len(free)}")
        self._require_rows("claim_slots", n, replica_idx)
        for slot in free[:n]:
            self._claim_slot(slot, replica_idx, slot)
        return free[:n]

    def external_claim(self, seq_ids: Sequence[int], replica_idx: int = 0) -> None:
        """Claim the slots that the caller chose; all of them or, with RequestError, none."""
        free = {s for s in self._pool(replica_idx).free_pages() if s not in self._claimed}
        if len(set(seq_ids)) < len(seq_ids) or not free.issuperset(seq_ids):
            raise RequestError(
                f"external_claim: expected different free slots of {sorted(free)}, "
                f"got {list(seq_ids)}"
            )
        self._require_rows("external_claim", len(seq_ids), replica_idx)
        for seq_id in seq_ids:
            self._claim_slot(seq_id, replica_idx, seq_id)

    @property
    def slots_remaining(self) -> set[int]:
        """Free slots of replica 0."""
        return set(self._pool(0).free_pages())

    def _require_rows(self, call: str, n: int, replica_idx: int) -> None:
        """CapacityError unless `n` more requests can be claimed: dummies take rows, not slots."""
        free = len(self._replicas[replica_idx].free_rows)
        if n > free:
            raise CapacityError(
                f"{call}: expected {n} free rows among the max_batch_size="
                f"{self.max_batch_size} of replica {replica_idx}, got {free}"
            )

    def _claim_slot(self, request_id: RequestID, replica_idx: int, slot: int | None) -> None:
        """Cannot fail but for CapacityError: there are as many slots as rows."""
        replica = self._replicas[replica_idx]
        row = replica.open_row(request_id)
        leaf = replica.leaves[0]
        if slot is None:
            slot = leaf.pool.take(1)[0]
        else:
            leaf.pool.hold([slot])
        leaf.extend(row, 0, [slot])
        row.capacity = replica.settings.page_size
        self._claimed[request_id] = row
        self._verify()

    def _pool(self, replica_idx: int) -> PagePool:
        return self._pools(replica_idx, "replica_idx")[0]


def _require_supported(params: KVCacheParams) -> None:
    for name, value, supported in (
        ("enable_prefix_caching", params.enable_prefix_caching, False),
        ("quantization", params.quantization, None),
    ):
        if value != supported:
            raise UnsupportedError(
                f"{name}: expected {supported} for a continuous cache, got {value}"
            )
