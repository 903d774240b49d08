"""The manager of compile-only mode: it describes a cache on devices that need not exist."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property

from kvgraph.contract.devices import Device
from kvgraph.contract.dims import (
    BATCH_SIZE,
    MAX_NUM_PAGES,
    MAX_SEQ_LEN,
    NUM_PAGE_SLOTS,
    NUM_SLOTS,
    NUM_STEPS,
    TensorType,
)
from kvgraph.contract.inputs import (
    BatchCharacteristics,
    Buffer,
    KVCacheInputs,
    MultiKVCacheInputs,
    PaddedKVCacheInputs,
    RaggedKVCacheInputs,
    SessionInterface,
    join_devices,
)
from kvgraph.contract.params import KVCacheParamInterface, KVCacheStrategy
from kvgraph.contract.symbols import (
    KVCacheInputSymbols,
    MultiKVCacheInputSymbols,
    PaddedKVCacheInputSymbols,
)
from kvgraph.contract.synonyms import also_named
from kvgraph.contract.values import require_integer
from kvgraph.errors import ParamsError, RequestError
from kvgraph.kv.manager import KVCacheManager
from kvgraph.kv.metrics import KVCacheMetrics
from kvgraph.kv.multistep import Nest, StepInputs
from kvgraph.kv.pool.slots import Slots, no_slots
from kvgraph.kv.requests import (
    Batches,
    RequestID,
    TextContext,
    require_key,
    require_steps,
    require_unclaimed,
)


class NullKVCacheManager(KVCacheManager):
    """A manager that never allocates memory and has the same symbols as the paged manager.

    `devices` override those of `params`. `page_size` and `num_layers`, if given, must agree with
    `params` (ParamsError; a tree has the layers of all its leaves). Claims are tracked; alloc and
    step do nothing; all figures are constants. `session` and `available_cache_memory` are stored
    but not used.
    """

    def __init__(
        self,
        params: KVCacheParamInterface,
        max_batch_size: int,
        max_seq_len: int,
        num_layers: int | None = None,
        devices: Sequence[Device] | None = None,
        session: SessionInterface | None = None,
        available_cache_memory: int = 0,
        page_size: int | None = None,
    ) -> None:
        layers = sum(leaf.num_layers for leaf in params.leaves.values())
        for name, given, expected in (
            ("page_size", page_size, params.page_size),
            ("num_layers", num_layers, layers),
        ):
            if given not in (None, expected):
                raise ParamsError(f"{name}: expected {expected} from params, got {given}")
        strategy = next(iter(params.leaves.values())).cache_strategy
        is_ragged = strategy is not KVCacheStrategy.PADDED
        super().__init__(params, max_batch_size, max_seq_len, None, devices, session, is_ragged)
        self.available_cache_memory = available_cache_memory
        self.page_size = params.page_size
        self._metrics = KVCacheMetrics()
        self._claimed: dict[RequestID, int] = {}
        self.get_symbolic_inputs()  # ParamsError if the heads cannot be divided among the devices

    # -- lifecycle: claims are tracked, the rest does nothing

    def claim(self, request_id: RequestID, replica_idx: int | None = None) -> None:
        replica = require_integer(
            "claim: replica_idx", 0 if replica_idx is None else replica_idx, RequestError, least=0
        )
        require_key(request_id)
        require_unclaimed(request_id, self._claimed.get(request_id))
        self._claimed[request_id] = replica

    def alloc(
        self, data: TextContext, replica_idx: int = 0, *, num_steps: int = 1, lookahead: int = 0
    ) -> None:
        """Do nothing. On its API page the second argument is the number of steps."""

    def alloc_batch(self, batches: Batches, *, num_steps: int = 1, lookahead: int = 0) -> None:
        """Do nothing."""

    def require_room(self, request_id: RequestID, tokens: int, chunk: int) -> None:
        """Do nothing: no memory is used, so every request fits."""

    def has_room(self, ctx: TextContext, replica_idx: int = 0) -> bool:
        return True

    def alloc_dummy(self, request_id: RequestID, replica_idx: int = 0) -> None:
        """Claim the request."""
        self.claim(request_id, replica_idx)

    @also_named(batch="batches")
    def step(self, batches: Batches | Sequence[TextContext]) -> None:
        """Do nothing."""

    @also_named(seq_id="request_id")
    def release(self, request_id: RequestID, replica_idx: int | None = None) -> None:
        """Remove the claim; do nothing for a request that is not claimed."""
        require_key(request_id)
        claimed_on = self._claimed.get(request_id)
        if claimed_on is not None and replica_idx not in (None, claimed_on):
            raise RequestError(
                f"release of {request_id!r}: expected a request claimed on replica {replica_idx}, "
                f"got one claimed on replica {claimed_on}"
            )
        self._claimed.pop(request_id, None)

    @cached_property
    def _slots(self) -> Slots:
        raise no_slots(self)

    def rebuild(self) -> None:
        """Remove all claims."""
        self._claimed = {}

    @also_named(seq_id="request_id")
    def contains(self, request_id: RequestID, replica_idx: int | None = None) -> bool:
        require_key(request_id)
        claimed_on = self._claimed.get(request_id)
        return claimed_on is not None and replica_idx in (None, claimed_on)

    def reset_metrics(self) -> None:
        """Do nothing: the counters never change."""

    def reset_prefix_cache(self) -> None:
        """Do nothing."""

    # -- symbols and dummies

    def get_symbolic_inputs(
        self, devices: Sequence[Device] | None = None, num_layers: int | None = None
    ) -> Sequence[KVCacheInputSymbols]:
        return self.params.get_symbolic_inputs(
            self.devices if devices is None else devices, num_layers
        )

    def input_symbols(self) -> Sequence[KVCacheInputSymbols]:
        return self.get_symbolic_inputs()

    def runtime_inputs(
        self,
        batches: Batches,
        *,
        max_cache_length: int | None = None,
        batch_characteristics: BatchCharacteristics | None = None,
        num_steps: int = 1,
    ) -> KVCacheInputs:
        """Dummies without memory that bind to the symbols; their sizes are arbitrary."""
        rows = max((len(batch) for batch in batches), default=0)
        return join_devices(self._dummies(rows, num_steps))

    def fetch(self, batch: Sequence[TextContext], num_steps: int = 1) -> list[KVCacheInputs]:
        """One record of dummies per device."""
        return self._dummies(len(batch), num_steps)

    def increment_cache_lengths(
        self, kv_cache_inputs: Nest, prev_model_inputs: StepInputs | Sequence[StepInputs]
    ) -> Nest:
        """`kv_cache_inputs`, unchanged."""
        return kv_cache_inputs

    def _dummies(self, rows: int, num_steps: int) -> list[KVCacheInputs]:
        sizes = {
            BATCH_SIZE: rows,
            MAX_NUM_PAGES: 1,
            NUM_PAGE_SLOTS: 1,
            NUM_SLOTS: 1,
            NUM_STEPS: 1 + require_steps(num_steps),
            MAX_SEQ_LEN: self.max_seq_len,
        }
        return [_dummy_record(symbols, sizes) for symbols in self.get_symbolic_inputs()]

    # -- constants

    def get_req_blocks(self, request_id: RequestID, replica_idx: int = 0) -> list[int]:
        return []

    def get_replica(self, context: TextContext) -> int:
        return 0

    def get_or_recommend_replica(self, context: TextContext) -> int:
        return 0

    def get_data_parallel_splits(self, batch: Sequence[TextContext]) -> list[list[int]]:
        """One split of all indices."""
        return [list(range(len(batch)))]

    @property
    def num_free_blocks(self) -> int:
        return 1000

    @property
    def free_blocks_pct(self) -> float:
        return 1.0

    @property
    def used_blocks_pct(self) -> float:
        return 0.0

    @property
    def host_committed_block_pct(self) -> float:
        return 0.0

    @property
    def total_num_host_pages(self) -> int:
        return 0

    @property
    def metrics(self) -> KVCacheMetrics:
        return self._metrics

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
        return 0

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
        return 1


def _dummy_record(symbols: KVCacheInputSymbols, sizes: Mapping[str, int]) -> KVCacheInputs:
    if isinstance(symbols, MultiKVCacheInputSymbols):
        return MultiKVCacheInputs(
            {name: _dummy_record(child, sizes) for name, child in symbols.children.items()}
        )
    values = [_dummy(symbol, sizes) for symbol in symbols]
    if isinstance(symbols, PaddedKVCacheInputSymbols):
        return PaddedKVCacheInputs(*values)
    return RaggedKVCacheInputs(*values)


def _dummy(symbol: TensorType, sizes: Mapping[str, int]) -> Buffer:
    """Dummy Buffer without memory; a dim's name is a name in `sizes` after prefixes of replica and
    leaf."""
    extents = {
        dim: next(size for name, size in sizes.items() if dim.endswith(name))
        for dim in symbol.symbolic_dims
    }
    return Buffer(symbol.dtype, symbol.extents(extents), symbol.device)
