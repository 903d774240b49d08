"""Interface of every cache manager, with defaults for the subclasses that users write."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import cached_property

from kvgraph.contract.devices import Device
from kvgraph.contract.dims import ceildiv
from kvgraph.contract.inputs import (
    BatchCharacteristics,
    KVCacheInputs,
    SessionInterface,
    join_devices,
)
from kvgraph.contract.not_copyable import NotCopyable
from kvgraph.contract.params import KVCacheParamInterface, KVCacheParams, as_devices
from kvgraph.contract.symbols import KVCacheInputSymbols
from kvgraph.contract.synonyms import also_named
from kvgraph.contract.values import require_integer
from kvgraph.errors import ParamsError, RequestError, UnsupportedError
from kvgraph.kv.memory import plan_memory
from kvgraph.kv.multistep import Nest, StepInputs, advance
from kvgraph.kv.pool.slots import Slots, lowest, require_name
from kvgraph.kv.requests import (
    Batches,
    RequestID,
    TextContext,
    per_replica,
    require_context,
    require_steps,
)
from kvgraph.signal_handlers import ignoring


class KVCacheManager(NotCopyable, ABC):
    """Bookkeeping of a KV cache: `claim -> (alloc -> runtime_inputs -> step)* -> release`.

    A manager never reads or writes K and V: sessions run graphs over the buffers that
    `runtime_inputs` returns. Misuse raises RequestError, a ValueError, and changes nothing. Not
    thread-safe: the caller must not let calls overlap, as an engine does not.

    Made to be subclassed: a subclass defines `fetch` and `input_symbols`. By default each of
    `max_batch_size` slots of a replica holds a sequence of `max_seq_len` tokens. `num_layers` and
    `devices` override the values of `params`. `session` owns the memory. `is_ragged`: whether rows
    of a batch differ in length.
    """

    _of_slots = False  # whether memory is slots of max_seq_len tokens, not pages

    def __init__(
        self,
        params: KVCacheParamInterface,
        max_batch_size: int,
        max_seq_len: int,
        num_layers: int | None = None,
        devices: Sequence[Device] | None = None,
        session: SessionInterface | None = None,
        is_ragged: bool = False,
    ) -> None:
        self.max_batch_size = require_integer(
            "max_batch_size", max_batch_size, ParamsError, least=1
        )
        self.max_seq_len = require_integer("max_seq_len", max_seq_len, ParamsError, least=1)
        self.params = _deployed(params, num_layers, devices)
        self.num_layers = sum(leaf.num_layers for leaf in self.params.leaves.values())
        self.devices = self.params.devices if devices is None else as_devices(devices)
        self.session = session
        self.is_ragged = is_ragged

    # -- what a subclass defines

    @abstractmethod
    def fetch(self, batch: Sequence[TextContext], num_steps: int = 1) -> Sequence[KVCacheInputs]:
        """Values of one replica for `num_steps` steps without a manager call: a record per device.

        Call `alloc(ctx, num_steps=...)` before, and `increment_cache_lengths` between the steps.
        """

    @abstractmethod
    def input_symbols(self) -> Sequence[KVCacheInputSymbols]:
        """One record of input symbols per device, replica-major; allocates nothing."""

    # -- lifecycle

    @also_named(n="request_id")
    def claim(self, request_id: RequestID, replica_idx: int = 0) -> None:
        """Pin a request to a replica until its release.

        RequestError if it is claimed already, CapacityError if no row is left. A manager of slots
        refuses a number: `claim_slots(n)` claims n of them.
        """
        require_name(request_id)
        self._slots.claim(request_id, replica_idx)

    def claim_slots(self, n: int, replica_idx: int = 0) -> list[int]:
        """Claim `n` free slots; each slot's number is the id of its sequence.

        CapacityError if fewer are free, RequestError if n < 1.
        """
        chosen = lowest(n, self._slots.unnamed(replica_idx, "claim_slots"))
        self._slots.claim_numbers(chosen, replica_idx)
        return chosen

    def external_claim(self, seq_ids: Sequence[int], replica_idx: int = 0) -> None:
        """Claim the slots `seq_ids` of the caller's choice: all, or none with RequestError."""
        self._slots.claim_numbers(seq_ids, replica_idx)

    @property
    def slots_remaining(self) -> set[int]:
        """Free slots of replica 0."""
        return self._slots.free(0, "slots_remaining")

    def alloc(
        self, data: TextContext, replica_idx: int = 0, *, num_steps: int = 1, lookahead: int = 0
    ) -> None:
        """Hold memory for `processed + active + num_steps - 1 + lookahead` tokens; never shrinks.

        If the row owns no page, the prefix cache is looked up first, and `data` skips the tokens
        found there. Atomic: InsufficientPagesError or RequestError leave request and manager
        unchanged. A manager of slots has the memory already: RequestError if the tokens do not fit
        into `max_seq_len`.
        """
        extra = require_steps(num_steps, lookahead)
        require_context(data, "alloc")
        self._slots.slot_of(data.request_id, replica_idx, "alloc")
        self._require_fits(data, extra)

    def alloc_batch(self, batches: Batches, *, num_steps: int = 1, lookahead: int = 0) -> None:
        """`alloc` for all requests of a step: all of them succeed, or nothing changes."""
        for replica_idx, batch in enumerate(self._per_replica(batches, "alloc_batch")):
            for ctx in batch:
                self.alloc(ctx, replica_idx, num_steps=num_steps, lookahead=lookahead)

    def runtime_inputs(
        self,
        batches: Batches,
        *,
        max_cache_length: int | None = None,
        batch_characteristics: BatchCharacteristics | None = None,
        num_steps: int = 1,
    ) -> KVCacheInputs:
        """Values that bind to the symbols, valid until the next call but one; with a session that
        copies them to a GPU (backend `torch` on `cuda`) until the next call. Changes no page.

        The default joins `fetch` of each replica, and raises UnsupportedError for either bound.
        """
        if (max_cache_length, batch_characteristics) != (None, None):
            raise UnsupportedError(
                f"runtime_inputs: expected no max_cache_length and no batch_characteristics from "
                f"{type(self).__name__}, which only defines fetch, "
                f"got {max_cache_length} and {batch_characteristics}; override runtime_inputs"
            )
        given = self._per_replica(batches, "runtime_inputs")
        return join_devices([record for batch in given for record in self.fetch(batch, num_steps)])

    @also_named(batch="batches")
    def step(self, batches: Batches | Sequence[TextContext]) -> None:
        """Commit pages that are full and processed; call it after `update`. A flat list is the
        batch of the only replica.

        Without a prefix cache nothing is committed: it checks that the requests are claimed.
        """
        for replica_idx, batch in enumerate(self._per_replica(batches, "step")):
            for ctx in batch:
                self._slots.slot_of(ctx.request_id, replica_idx, "step")

    @also_named(seq_id="request_id")
    def release(self, request_id: RequestID, replica_idx: int = 0) -> None:
        """Free the row or slot of the request, and all pages that it holds."""
        self._slots.release(request_id, replica_idx)

    @contextmanager
    def reserve(self, replica_batches: Batches | Sequence[TextContext]) -> Iterator[None]:
        """Claim and alloc all requests for a scope; they are always released at its end.

        A flat list is the batch of the only replica. A request that the scope itself has released
        is skipped. An exception of the scope is raised on, even if a release fails too.
        """
        batches = self._per_replica(replica_batches, "reserve")
        claimed: list[tuple[RequestID, int]] = []
        try:
            for replica_idx, batch in enumerate(batches):
                for ctx in batch:
                    self.claim(ctx.request_id, replica_idx)
                    claimed.append((ctx.request_id, replica_idx))
            self.alloc_batch(batches)
            yield
        except BaseException:
            with ignoring(Exception):
                self._release_all(claimed)
            raise
        self._release_all(claimed)

    # -- several steps

    def get_runtime_inputs(
        self, batch: Sequence[TextContext], num_steps: int = 1
    ) -> Sequence[KVCacheInputs]:
        """Synonym of `fetch`."""
        return self.fetch(batch, num_steps)

    def increment_cache_lengths(
        self, kv_cache_inputs: Nest, prev_model_inputs: StepInputs | Sequence[StepInputs]
    ) -> Nest:
        """Values for the next of several steps, in the nesting of `kv_cache_inputs`.

        On the device `cache_lengths += row_offsets[1:] - row_offsets[:-1]`, without a sync; then
        `max_lengths = max_lengths[1:]`. `prev_model_inputs`: inputs of the previous step (its
        `input_row_offsets` is read), or a sequence of them for several replicas. The manager's
        state does not change; records of the previous step become invalid.
        """
        replicas = self.params.data_parallel_degree
        return advance(kv_cache_inputs, prev_model_inputs, replicas, self.session)

    # -- pages from tiers below the device: a manager without tiers never waits

    def prefetch(self, contexts: Sequence[TextContext], replica_idx: int = 0) -> list[bool]:
        """Look up in the tiers below the device the pages that each request's first `alloc` could
        load. Returns one boolean per request.

        False: the lookup goes on, or another request is loading the same pages; call again after
        `wait`. Without `prefetch`, `alloc` finds only pages on the device.
        """
        return [True] * len(contexts)

    def is_loading(self, request_id: RequestID) -> bool:
        """Whether pages of the request are being loaded: it cannot run before `poll` returns it.

        `poll` also says whether the load failed: then call `alloc` again.
        """
        return False

    def poll(self) -> dict[RequestID, bool]:
        """Requests whose load has ended since the last call, each once.

        True: the pages are loaded, and `alloc` goes on. False: the load failed, and the request is
        as after `claim`: call `alloc` again, and its tokens are computed.
        """
        return {}

    def wait(self, timeout: float | None = None) -> bool:
        """Block until `poll` or `prefetch` may have results; False after `timeout` seconds."""
        return True

    def rebuild(self) -> None:
        """Reset all bookkeeping on the same memory: nothing is claimed, nothing is cached.

        Use it after a call that an interrupt or a lack of memory stopped: any state is accepted.
        Running copies between tiers are waited for, queued ones are dropped; metrics stay. A
        `rebuild` that is itself interrupted can be called again.
        """
        vars(self).pop("_slots", None)

    def close(self) -> None:
        """Finish queued work of the tiers, for 10 seconds at most, and close them. Idempotent."""
        return

    # -- queries: they change nothing

    @also_named(seq_id="request_id")
    def contains(self, request_id: RequestID, replica_idx: int = 0) -> bool:
        """Whether the request is claimed on that replica."""
        return self._slots.replica_of(request_id) == replica_idx

    def require_room(self, request_id: RequestID, tokens: int, chunk: int) -> None:
        """Raise RequestError if `tokens` tokens, at most `chunk` of them new in a step, can never
        fit."""
        if tokens > self.max_seq_len:
            raise RequestError(
                f"request {request_id!r}: expected at most max_seq_len={self.max_seq_len} tokens, "
                f"got {tokens}"
            )

    def has_room(self, ctx: TextContext, replica_idx: int = 0) -> bool:
        """Whether `alloc(ctx)` would succeed now, and later ones would not exceed `max_seq_len`;
        changes nothing."""
        return ctx.current_length <= self.max_seq_len

    def coming_pages(self, contexts: Sequence[TextContext], replica_idx: int = 0) -> set[bytes]:
        """Digests of the prompts' pages that the next step of `contexts` computes, in full or in
        part.

        Empty if no pages are shared.
        """
        return set()

    def missing_page(self, ctx: TextContext, replica_idx: int = 0) -> bytes | None:
        """Digest of the first page that the first `alloc(ctx)` would not find on the device.

        None if it finds every possible page, or if no pages are shared.
        """
        return None

    def get_req_blocks(self, request_id: RequestID, replica_idx: int = 0) -> list[int]:
        """Page ids of the request, in the order of its tokens; its slot in a manager of slots."""
        return [self._slots.slot_of(request_id, replica_idx, "get_req_blocks")]

    def get_symbolic_inputs(
        self, devices: Sequence[Device] | None = None, num_layers: int | None = None
    ) -> Sequence[KVCacheInputSymbols]:
        """`input_symbols` for other devices or layers than the manager's own."""
        if (devices, num_layers) != (None, None):
            raise UnsupportedError(
                f"get_symbolic_inputs: expected no devices and no num_layers from "
                f"{type(self).__name__}, which only defines input_symbols, "
                f"got {devices} and {num_layers}; override get_symbolic_inputs"
            )
        return self.input_symbols()

    def num_kv_inputs(self) -> int:
        """Number of fields of one record."""
        return len(self.input_symbols()[0])

    @classmethod
    def estimated_memory_size(
        cls,
        params: KVCacheParamInterface,
        max_batch_size: int,
        max_seq_len: int,
        num_layers: int | None,
        available_cache_memory: int,
        devices: Sequence[Device] | None = None,
        **kwargs: object,
    ) -> int:
        """Bytes of all replicas' pages or slots. `available_cache_memory`: bytes of one replica."""
        params = _deployed(params, num_layers, devices, max_seq_len if cls._of_slots else None)
        plan = plan_memory(params, available_cache_memory, max_batch_size, max_seq_len)
        return plan.nbytes * params.data_parallel_degree

    @classmethod
    def infer_optimal_batch_size(
        cls,
        params: KVCacheParamInterface,
        max_seq_len: int,
        num_layers: int | None,
        available_cache_memory: int,
        devices: Sequence[Device] | None = None,
        **kwargs: object,
    ) -> int:
        """Largest batch whose maximum-length requests all fit in one replica, at least 1.

        ParamsError if a size is no integer, or `max_seq_len` is below 1.
        """
        params = _deployed(params, num_layers, devices, max_seq_len if cls._of_slots else None)
        available = require_integer("available_cache_memory", available_cache_memory, ParamsError)
        max_seq_len = require_integer("max_seq_len", max_seq_len, ParamsError, least=1)
        pages = available // params.bytes_per_page
        return max(1, pages // ceildiv(max_seq_len, params.page_size))

    # -- slots

    @cached_property
    def _slots(self) -> Slots:
        return Slots(self.max_batch_size, self.params.data_parallel_degree)

    def _release_all(self, claimed: Sequence[tuple[RequestID, int]]) -> None:
        """Release in reverse order; each is released even if the release of another raises."""
        with ExitStack() as releases:
            for request_id, replica_idx in claimed:
                if self.contains(request_id, replica_idx):
                    releases.callback(self.release, request_id, replica_idx)

    def _require_fits(self, ctx: TextContext, extra: int) -> None:
        total = ctx.processed_length + ctx.active_length + extra
        if total > self.max_seq_len:
            raise RequestError(
                f"alloc of {ctx.request_id!r}: expected at most max_seq_len={self.max_seq_len} "
                f"tokens, got {total}"
            )

    def _per_replica(self, batches: Batches | Sequence[TextContext], call: str) -> Batches:
        given = per_replica(batches, self.params.data_parallel_degree, call)
        for batch in given:
            for ctx in batch:
                require_context(ctx, call)
        return given


def _deployed(
    params: KVCacheParamInterface,
    num_layers: int | None,
    devices: Sequence[Device] | None,
    slot: int | None = None,
) -> KVCacheParamInterface:
    """`params` with these layers and devices; a tree is unchanged: its leaves have their own.
    `slot`: tokens of a slot, which is one page."""
    if not isinstance(params, KVCacheParams):
        return params
    if slot is not None:
        slot = require_integer("max_seq_len", slot, ParamsError, least=1)
    return replace(
        params,
        page_size=slot or params.page_size,
        num_layers=params.num_layers if num_layers is None else num_layers,
        devices=params.devices if devices is None else as_devices(devices),
    )
