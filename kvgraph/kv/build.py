"""Parts of a paged manager, made from its arguments.

    require_sizes -> make_settings -> make_replicas -> open_bridge

`make_replicas` allocates memory; files are opened and threads are started only after it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from kvgraph.contract.abilities import Uploads
from kvgraph.contract.devices import Device
from kvgraph.contract.inputs import KVCacheInputs, MultiKVCacheInputs, SessionInterface
from kvgraph.contract.params import KVCacheParamInterface, KVCacheParams
from kvgraph.contract.symbols import KVCacheInputSymbols
from kvgraph.contract.values import require_integer
from kvgraph.errors import ParamsError
from kvgraph.kv.pool.identity import PoolSettings
from kvgraph.kv.pool.leaf import Leaf, RaggedSymbols, allocate_shard, table_width
from kvgraph.kv.pool.replica import Replica
from kvgraph.kv.pool.rows import UNBOUNDED
from kvgraph.kv.tiers.bridge import TierBridge
from kvgraph.kv.tiers.leaf_pools import LeafPools
from kvgraph.kv.tiers.open import StoreOpener, open_tiers

WINDOWED_SEQ_LEN = 131072
"""Longest context of a cache with a window when `max_seq_len` is not given, in tokens."""


MOST_COUNT = (1 << 31) - 2
"""Most pages, rows and tokens: indices are int32, and the null page is one more page."""


class Sizes(NamedTuple):
    """Sizes of a manager. `pages`, `widths`: usable pages of each replica and columns of its lookup
    rows, by leaf path. `host_pages`: pages of the host tier, which replicas share, by leaf path."""

    pages: Mapping[str, int]
    host_pages: Mapping[str, int]
    widths: Mapping[str, int]
    max_batch_size: int
    max_seq_len: int


def require_sizes(
    params: KVCacheParamInterface,
    total_num_pages: int | Mapping[str, int],
    total_num_host_pages: int | Mapping[str, int],
    max_batch_size: int,
    max_seq_len: int | None,
) -> Sizes:
    """Check the arguments' types and ranges and return the sizes; a mapping must name each leaf.

    Raises ParamsError.
    """
    pages = _by_leaf("total_num_pages", params, total_num_pages, 1)
    max_batch_size = require_integer(
        "max_batch_size", max_batch_size, ParamsError, least=1, most=MOST_COUNT
    )
    if max_seq_len is not None:
        max_seq_len = require_integer(
            "max_seq_len", max_seq_len, ParamsError, least=1, most=MOST_COUNT
        )
    host_pages = _by_leaf("total_num_host_pages", params, total_num_host_pages, 0)
    widths = _widths(params, pages, max_seq_len)
    longest = _windowed_tokens(params, widths) if max_seq_len is None else max_seq_len
    return Sizes(pages, host_pages, widths, max_batch_size, longest)


def make_settings(
    params: KVCacheParamInterface, sizes: Sizes, identity: bytes, *, has_tiers: bool
) -> PoolSettings:
    """Settings of all replicas. ParamsError for tiers without a prefix cache, and for an identity
    that is not bytes."""
    if not isinstance(identity, bytes):
        raise ParamsError(f"identity: expected bytes, got {type(identity).__name__}")
    if has_tiers and not params.enable_prefix_caching:
        raise ParamsError("tiers: expected enable_prefix_caching=True, got False")
    return PoolSettings(
        params.page_size,
        sizes.max_batch_size,
        sizes.max_seq_len,
        params.enable_prefix_caching,
        _model_identity(params, identity),
        params.hash_seed,
    )


def make_replicas(
    params: KVCacheParamInterface,
    session: SessionInterface | None,
    sizes: Sizes,
    settings: PoolSettings,
) -> list[Replica]:
    """Make all data-parallel replicas; the session allocates their pools."""
    symbols = params.get_symbolic_inputs()
    replicas = []
    for index in range(params.data_parallel_degree):
        upload = session.uploader() if isinstance(session, Uploads) else None
        shards = slice(index * params.n_shards, (index + 1) * params.n_shards)
        leaves = [
            _make_leaf(path, leaf, symbols[shards], leaf.devices[shards], session, sizes)
            for path, leaf in params.leaves.items()
        ]
        replicas.append(Replica(index, leaves, settings, upload))
    return replicas


def open_bridge(
    replicas: Sequence[Replica],
    pools: Sequence[Sequence[LeafPools]],
    host_pages: Mapping[str, int],
    stores: Sequence[StoreOpener],
    sources: Sequence[StoreOpener],
    *,
    threads: bool,
) -> TierBridge:
    """Open the tiers below `pools[replica][leaf]`."""
    leaves = replicas[0].leaves
    connector = open_tiers(
        pools,
        {own.leaf: leaf.pool.num_pages for own, leaf in zip(pools[0], leaves, strict=True)},
        host_pages,
        replicas[0].settings.identity,
        stores,
        sources,
        threads=threads,
    )
    return TierBridge(connector, replicas, pools)


def _by_leaf(
    name: str, params: KVCacheParamInterface, pages: int | Mapping[str, int], least: int
) -> dict[str, int]:
    given = pages if isinstance(pages, Mapping) else dict.fromkeys(params.leaves, pages)
    if set(given) != set(params.leaves):
        raise ParamsError(f"{name}: expected the leaves {list(params.leaves)}, got {list(given)}")
    names = {path: f"{name}[{path!r}]" if path else name for path in params.leaves}
    return {
        path: require_integer(where, given[path], ParamsError, least=least, most=MOST_COUNT)
        for path, where in names.items()
    }


def _widths(
    params: KVCacheParamInterface, pages: Mapping[str, int], max_seq_len: int | None
) -> dict[str, int]:
    """Columns of the lookup rows, by leaf path."""
    largest = max(pages.values()) * params.page_size
    default = max(WINDOWED_SEQ_LEN, largest)
    return {
        path: table_width(leaf, pages[path], max_seq_len, windowed_default=default)
        for path, leaf in params.leaves.items()
    }


def _windowed_tokens(params: KVCacheParamInterface, widths: Mapping[str, int]) -> int:
    """Most tokens of a context in leaves with a window: the lookup rows bound it, not the pool."""
    windowed = [path for path, leaf in params.leaves.items() if leaf.window_size is not None]
    return min((widths[path] * params.page_size for path in windowed), default=UNBOUNDED)


def _model_identity(params: KVCacheParamInterface, identity: bytes) -> bytes:
    """Bytes that differ for different models and layouts; part of each page's identity."""
    return json.dumps(params.layout_dict(), sort_keys=True).encode() + b"\0" + identity


def _make_leaf(
    path: str,
    params: KVCacheParams,
    records: Sequence[KVCacheInputSymbols],
    devices: Sequence[Device],
    session: SessionInterface | None,
    sizes: Sizes,
) -> Leaf:
    """Make the leaf at `path` of one replica; its shards have these records and devices."""
    symbols: list[RaggedSymbols] = [leaf_at(record, path) for record in records]
    slots, *tokens = symbols[0].kv_blocks.symbolic_dims
    extents = {slots: sizes.pages[path] + 1}
    extents |= dict.fromkeys(tokens, params.page_size)  # a slot holds a whole sequence
    buffers = [
        allocate_shard(shard, extents, device, session, params.page_size)
        for shard, device in zip(symbols, devices, strict=True)
    ]
    return Leaf(
        symbols,
        buffers,
        sizes.pages[path],
        sizes.max_batch_size,
        sizes.widths[path],
        params.window_size,
    )


def leaf_at(record: Any, path: str) -> Any:
    """The leaf's record at a dotted path of a tree's record; a single cache is at ""."""
    for name in path.split(".") if path else ():
        record = record.children[name]
    return record


def nested(leaves: Mapping[str, KVCacheInputs]) -> MultiKVCacheInputs:
    """Join the values of leaves, by path, into the values of the tree."""
    children: dict[str, Any] = {}
    for path, leaf in leaves.items():
        name, _, inner = path.partition(".")
        if inner:
            children.setdefault(name, {})[inner] = leaf
        else:
            children[name] = leaf
    return MultiKVCacheInputs(
        {name: nested(c) if isinstance(c, dict) else c for name, c in children.items()}
    )
