"""Continuous batching without pages: one slot of `max_seq_len` tokens per sequence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from kvgraph.contract.devices import Device
from kvgraph.contract.inputs import SessionInterface
from kvgraph.contract.params import (
    KVCacheParamInterface,
    KVCacheParams,
    KVCacheStrategy,
    as_devices,
)
from kvgraph.contract.synonyms import also_named
from kvgraph.contract.values import require_integer
from kvgraph.errors import CapacityError, ParamsError
from kvgraph.kv.paged import PagedKVCacheManager
from kvgraph.kv.pool.leaf import require_params, require_plain
from kvgraph.kv.pool.pages import PagePool
from kvgraph.kv.pool.rows import Phase
from kvgraph.kv.pool.slots import lowest, require_name, require_numbers
from kvgraph.kv.requests import Batches, RequestID, TextContext


class ContinuousBatchingKVCacheManager(PagedKVCacheManager):
    """A paged manager in which one page is the slot of a whole sequence; `claim` takes the slot.

    Each replica has `max_batch_size` slots and the null slot. `num_layers` and `devices` override
    the values of `params`. UnsupportedError for prefix caching (no slot can be shared) and for
    quantised pools.
    """

    _of_slots = True

    def __init__(
        self,
        params: KVCacheParams,
        max_batch_size: int,
        max_seq_len: int,
        num_layers: int | None = None,
        devices: Sequence[Device] | None = None,
        session: SessionInterface | None = None,
        is_ragged: bool = True,
        *,
        enable_runtime_checks: bool = False,
    ) -> None:
        require_plain(params, "continuous", is_ragged=(is_ragged, True))
        max_batch_size = require_integer("max_batch_size", max_batch_size, ParamsError, least=1)
        max_seq_len = require_integer("max_seq_len", max_seq_len, ParamsError, least=1)
        own = replace(
            params,
            num_layers=params.num_layers if num_layers is None else num_layers,
            devices=params.devices if devices is None else as_devices(devices),
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

    def _require_params(
        self, params: KVCacheParamInterface, session: SessionInterface | None
    ) -> None:
        """Do nothing: `__init__` checked the params of which these slots are made."""

    @also_named(n="request_id")
    def claim(self, request_id: RequestID, replica_idx: int = 0) -> None:
        """Pin a request to a free slot; `claim_slots(n)` claims n of them."""
        require_name(request_id)
        self._replica_to_claim(request_id, replica_idx)
        self._claim_slot(request_id, replica_idx, None)

    def claim_slots(self, n: int, replica_idx: int = 0) -> list[int]:
        chosen = lowest(n, self._unnamed(replica_idx))
        self._require_rows("claim_slots", n, replica_idx)
        for slot in chosen:
            self._claim_slot(slot, replica_idx, slot)
        return chosen

    def external_claim(self, seq_ids: Sequence[int], replica_idx: int = 0) -> None:
        require_numbers(seq_ids, self._unnamed(replica_idx))
        self._require_rows("external_claim", len(seq_ids), replica_idx)
        for seq_id in seq_ids:
            self._claim_slot(seq_id, replica_idx, seq_id)

    @also_named(batch="batches")
    def step(self, batches: Batches | Sequence[TextContext]) -> None:
        super().step(batches)

    @property
    def slots_remaining(self) -> set[int]:
        return set(self._pool(0).free_pages())

    def _unnamed(self, replica_idx: int) -> set[int]:
        """Free slots of the replica whose numbers are not ids of claimed sequences."""
        return set(self._pool(replica_idx).free_pages()) - self._claimed.keys()

    def _require_rows(self, call: str, n: int, replica_idx: int) -> None:
        """Raise CapacityError unless `n` rows are free: dummies take rows but no slots."""
        free = len(self._replicas[replica_idx].free_rows)
        if n > free:
            raise CapacityError(
                f"{call}: expected {n} free rows among the max_batch_size="
                f"{self.max_batch_size} of replica {replica_idx}, got {free}"
            )

    def _claim_slot(self, request_id: RequestID, replica_idx: int, slot: int | None) -> None:
        """Claim `slot`, or any free slot if None. Raises only CapacityError: there are as many
        slots as rows."""
        replica = self._replicas[replica_idx]
        row = replica.open_row(request_id)
        leaf = replica.leaves[0]
        if slot is None:
            slot = leaf.pool.take(1)[0]
        else:
            leaf.pool.hold([slot])
        leaf.extend(row, 0, [slot])
        row.enter(Phase.ALLOCATED, replica.settings)
        self._claimed[request_id] = row
        self._verify()

    def _pool(self, replica_idx: int) -> PagePool:
        return self._pools(replica_idx, "replica_idx")[0]
