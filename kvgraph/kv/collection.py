"""A view of a continuous cache as a kernel sees it; it owns no memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, NoReturn

import numpy as np

from kvgraph.contract.dims import Array
from kvgraph.contract.values import require_integer
from kvgraph.errors import BindingError, RequestError

if TYPE_CHECKING:
    from numpy.typing import ArrayLike

_LAYOUTS = ("blocks_layout", "blocks_tt_layout", "blocks_tt_type")
"""Compile-time members of the kernel-side view that an array has no type for."""


class KVCacheStaticParams(NamedTuple):
    """Sizes on which a kernel is specialised."""

    num_heads: int
    head_size: int


class ContinuousBatchingKVCache:
    """Keys or values of one layer: `cache[row, head, token]` is a `[D]` view of the slot."""

    __slots__ = ("_lookup", "_slots")

    def __init__(self, slots: Array, lookup_table: Array) -> None:
        self._slots = slots  # [num_slots, max_seq_len, K, D]
        self._lookup = lookup_table

    def __getitem__(self, index: tuple[int, int, int]) -> Array:
        row, head, token = index
        view: Array = self._slots[self._lookup[row], token, head]
        return view


class ContinuousBatchingKVCacheCollection:
    """The cache of the sequences of a batch, as views of memory that it does not own.

    - `blocks [num_slots, 2, L, max_seq_len, K, D]`, `cache_lengths [batch_size]`,
      `lookup_table [batch_size]`: arrays or host Buffers; never copied
    - `max_seq_length`: longest new run; `max_cache_length`: longest cached context, in tokens
    """

    name_str = "continuous_batching"
    scale_dtype = None
    CacheType = ContinuousBatchingKVCache

    def __init__(
        self,
        blocks: ArrayLike,
        cache_lengths: ArrayLike,
        lookup_table: ArrayLike,
        max_seq_length: int,
        max_cache_length: int,
    ) -> None:
        self.blocks: Array = np.asarray(blocks)
        self.cache_lengths: Array = np.asarray(cache_lengths)
        self.lookup_table: Array = np.asarray(lookup_table)
        self.max_seq_length = max_seq_length
        self.max_cache_length = max_cache_length
        for name, rank in (("blocks", 6), ("cache_lengths", 1), ("lookup_table", 1)):
            shape = getattr(self, name).shape
            if len(shape) != rank:
                raise BindingError(f"{name}: expected rank {rank}, got shape {list(shape)}")

    def __getattr__(self, name: str) -> NoReturn:
        hint = "; use blocks.shape and blocks.strides" if name in _LAYOUTS else ""
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}{hint}")

    @property
    def dtype(self) -> str:
        return str(self.blocks.dtype)

    @property
    def kv_params(self) -> KVCacheStaticParams:
        return KVCacheStaticParams(*self.blocks.shape[4:])

    @property
    def blocks_shape(self) -> tuple[int, ...]:
        """Shape of `blocks` as known at compile time; -1 for a dim that is not known."""
        return (-1, -1, -1, -1, *self.blocks.shape[4:])

    @property
    def kv_cache_dynamic_shape(self) -> tuple[int, int, int, int]:
        """`[num_slots, max_seq_len, K, D]`: the keys or values of one layer."""
        slots, _, _, tokens, heads, head_size = self.blocks.shape
        return slots, tokens, heads, head_size

    @property
    def kv_cache_dynamic_strides(self) -> tuple[int, int, int, int]:
        """Strides of `kv_cache_dynamic_shape`, in elements."""
        per_element = self.blocks.dtype.itemsize
        slot, _, _, token, head, element = (s // per_element for s in self.blocks.strides)
        return slot, token, head, element

    def get_key_cache(self, layer_idx: int) -> ContinuousBatchingKVCache:
        """Keys of one layer; a view."""
        return self._cache(layer_idx, 0)

    def get_value_cache(self, layer_idx: int) -> ContinuousBatchingKVCache:
        """Values of one layer; a view. With MLA it is the same memory as the keys."""
        return self._cache(layer_idx, self.blocks.shape[1] - 1)

    def cache_length(self, bs_idx: int) -> int:
        """Tokens cached for a row of the batch."""
        return int(self.cache_lengths[bs_idx])

    def _cache(self, layer_idx: int, kv: int) -> ContinuousBatchingKVCache:
        layers = self.blocks.shape[2]
        layer_idx = require_integer("layer_idx", layer_idx, RequestError)
        if not 0 <= layer_idx < layers:
            raise RequestError(f"layer_idx: expected 0 to {layers - 1}, got {layer_idx}")
        return ContinuousBatchingKVCache(self.blocks[:, kv, layer_idx], self.lookup_table)
