"""What every cache manager answers to."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from kvgraph.contract.devices import Device
from kvgraph.contract.dims import ceildiv
from kvgraph.contract.inputs import BatchCharacteristics, KVCacheInputs
from kvgraph.contract.params import KVCacheParamInterface, KVCacheParams
from kvgraph.contract.symbols import KVCacheInputSymbols
from kvgraph.errors import UnsupportedError
from kvgraph.kv.memory import plan_memory
from kvgraph.kv.requests import RequestID, TextContext

Batches = Sequence[Sequence[TextContext]]
"""One batch of requests per replica."""


class KVCacheManager(ABC):
    """Bookkeeping of a KV cache: `claim -> (alloc -> runtime_inputs -> step)* -> release`.

    A manager never reads or writes K and V: sessions run graphs over the buffers that
    `runtime_inputs` returns. Misuse raises ValueErrors (RequestError) and leaves it unchanged.
    Not thread-safe: its caller sees to it that calls do not overlap, as an engine does.
    """

    @abstractmethod
    def claim(self, request_id: RequestID, replica_idx: int = 0) -> None:
        """Pin a request to a replica for life.

        RequestError if it is claimed already, CapacityError if no row is left.
        """

    @abstractmethod
    def alloc(
        self, data: TextContext, replica_idx: int = 0, *, num_steps: int = 1, lookahead: int = 0
    ) -> None:
        """Own pages for `processed + active + num_steps - 1 + lookahead` tokens; never shrinks.

        While the row owns no page, the prefix cache is asked first and `data` skips what it gives.
        Atomic: InsufficientPagesError or RequestError leave request and manager unchanged.
        """

    @abstractmethod
    def alloc_batch(self, batches: Batches, *, num_steps: int = 1, lookahead: int = 0) -> None:
        """`alloc` for a whole step, atomic as a whole."""

    @abstractmethod
    def runtime_inputs(
        self,
        batches: Batches,
        *,
        max_cache_length: int | None = None,
        batch_characteristics: BatchCharacteristics | None = None,
        num_steps: int = 1,
    ) -> KVCacheInputs:
        """Values that bind to the symbols, valid until the next call but one. Changes no page."""

    @abstractmethod
    def step(self, batches: Batches | Sequence[TextContext]) -> None:
        """After `update`: commit what is full and processed; a flat list serves one replica."""

    @abstractmethod
    def release(self, request_id: RequestID, replica_idx: int = 0) -> None:
        """Give back all that the request owns."""

    @abstractmethod
    def contains(self, request_id: RequestID, replica_idx: int = 0) -> bool:
        """Whether the request is claimed on that replica."""

    @abstractmethod
    def require_room(self, request_id: RequestID, tokens: int, chunk: int) -> None:
        """RequestError if `tokens` tokens, `chunk` of them new at a time, never fit here at all."""

    @abstractmethod
    def has_room(self, ctx: TextContext, replica_idx: int = 0) -> bool:
        """Whether `alloc(ctx)` would succeed now; changes nothing."""

    def coming_pages(self, contexts: Sequence[TextContext], replica_idx: int = 0) -> set[bytes]:
        """Digests of the prompts' pages that the next step of `contexts` computes, or begins to.

        Empty where no pages are shared.
        """
        return set()

    def missing_page(self, ctx: TextContext, replica_idx: int = 0) -> bytes | None:
        """Digest of the first page that the first `alloc(ctx)` would not find on the device.

        None where it finds every page that it can, or where no pages are shared.
        """
        return None

    @abstractmethod
    def get_req_blocks(self, request_id: RequestID, replica_idx: int = 0) -> list[int]:
        """Page ids of the request, in the order of its tokens."""

    @abstractmethod
    def get_symbolic_inputs(
        self, devices: Sequence[Device] | None = None, num_layers: int | None = None
    ) -> Sequence[KVCacheInputSymbols]:
        """One record of input symbols per device, replica-major; allocates nothing."""

    @abstractmethod
    def get_runtime_inputs(
        self, batch: Sequence[TextContext], num_steps: int = 1
    ) -> Sequence[KVCacheInputs]:
        """One replica's values for `num_steps` steps without a manager call: a record per device.

        `alloc(ctx, num_steps=...)` comes first, `increment_cache_lengths` between the steps.
        """

    @abstractmethod
    def increment_cache_lengths(
        self, kv_cache_inputs: KVCacheInputs | Sequence[KVCacheInputs], prev_model_inputs: Any
    ) -> Any:
        """Values for the next of several steps, in the nesting of `kv_cache_inputs`.

        On the device `cache_lengths += row_offsets[1:] - row_offsets[:-1]`, without a sync; then
        `max_lengths = max_lengths[1:]`. `prev_model_inputs`: what the step before ran on (its
        `input_row_offsets` is read), a sequence of them for several replicas. The manager's state
        is untouched; records of the step before are not valid any more.
        """

    def prefetch(self, contexts: Sequence[TextContext], replica_idx: int = 0) -> list[bool]:
        """Ask the tiers below the device what the first `alloc` of each request could load.

        False while they are looking, or another request is loading the same pages: call again
        after `wait`. Without it `alloc` finds only what the device holds.
        """
        return [True] * len(contexts)

    def is_loading(self, request_id: RequestID) -> bool:
        """Whether pages of the request are on their way: it cannot run before `poll` named it."""
        return False

    def poll(self) -> dict[RequestID, bool]:
        """Requests whose pages are not on their way any more, each once.

        True: they have landed; `alloc` goes on. False: they have not, and the request is as after
        `claim`: `alloc` has it computed.
        """
        return {}

    def wait(self, timeout: float | None = None) -> bool:
        """Block until `poll` or `prefetch` may have news; False where `timeout` seconds passed."""
        return True

    def rebuild(self) -> None:
        """Start all bookkeeping over on the same memory: nothing is claimed, nothing is cached.

        For after a call that an interrupt or a lack of memory stopped: whatever state it left.
        Copies between tiers that go on are waited for, those that wait are dropped; metrics stay.
        A `rebuild` that is itself interrupted can be called again.
        """
        raise UnsupportedError(
            f"{type(self).__name__}.rebuild: expected a manager that starts over, got one that "
            "does not define it"
        )

    def close(self) -> None:
        """Finish what is queued for the tiers, and let go of them. Idempotent."""
        return

    def fetch(self, batch: Sequence[TextContext], num_steps: int = 1) -> Sequence[KVCacheInputs]:
        """Synonym of `get_runtime_inputs`."""
        return self.get_runtime_inputs(batch, num_steps)

    def input_symbols(self) -> Sequence[KVCacheInputSymbols]:
        """`get_symbolic_inputs` of the manager's own devices."""
        return self.get_symbolic_inputs()

    def num_kv_inputs(self) -> int:
        """Fields of one record."""
        return len(self.input_symbols()[0])

    @contextmanager
    def reserve(self, replica_batches: Batches) -> Iterator[None]:
        """Claim and alloc all requests for a scope; released on every way out of it."""
        claimed: list[tuple[RequestID, int]] = []
        try:
            for replica_idx, batch in enumerate(replica_batches):
                for ctx in batch:
                    self.claim(ctx.request_id, replica_idx)
                    claimed.append((ctx.request_id, replica_idx))
            self.alloc_batch(replica_batches)
            yield
        finally:
            for request_id, replica_idx in reversed(claimed):
                self.release(request_id, replica_idx)

    @classmethod
    def estimated_memory_size(
        cls,
        params: KVCacheParamInterface,
        max_batch_size: int,
        max_seq_len: int,
        num_layers: int,
        available_cache_memory: int,
        devices: Sequence[Device],
        **kwargs: Any,
    ) -> int:
        """Bytes of all replicas' usable pages; `available_cache_memory` is one replica's."""
        params = _deployed(params, num_layers, devices)
        plan = plan_memory(params, available_cache_memory, max_batch_size, max_seq_len)
        return plan.nbytes * params.data_parallel_degree

    @classmethod
    def infer_optimal_batch_size(
        cls,
        params: KVCacheParamInterface,
        max_seq_len: int,
        num_layers: int,
        available_cache_memory: int,
        devices: Sequence[Device],
        **kwargs: Any,
    ) -> int:
        """Largest batch whose maximum-length requests all fit in one replica, at least 1."""
        params = _deployed(params, num_layers, devices)
        pages = available_cache_memory // params.bytes_per_page
        return max(1, pages // ceildiv(max_seq_len, params.page_size))


def _deployed(
    params: KVCacheParamInterface, num_layers: int, devices: Sequence[Device]
) -> KVCacheParamInterface:
    """The params with these layers and devices; a tree's leaves have their own."""
    if isinstance(params, KVCacheParams):
        return replace(params, num_layers=num_layers, devices=tuple(devices))
    return params
