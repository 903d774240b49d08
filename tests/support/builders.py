"""Builders that the cache tests share."""

from __future__ import annotations

from typing import Any

from kvgraph.contract.devices import Device
from kvgraph.contract.params import KVCacheParams
from kvgraph.kv.paged import PagedKVCacheManager
from kvgraph.kv.requests import TextContext


def make_params(tp: int = 1, dp: int = 1, **changes: Any) -> KVCacheParams:
    """A small cache: 2 heads of 8, 2 layers, page 4, on `tp * dp` CPU devices."""
    fields: dict[str, Any] = {
        "dtype": "float32",
        "n_kv_heads": 2,
        "head_dim": 8,
        "num_layers": 2,
        "page_size": 4,
        "devices": tuple(Device(f"cpu:{i}") for i in range(tp * dp)),
        "data_parallel_degree": dp,
    }
    return KVCacheParams(**(fields | changes))


def make_manager(pages: int = 10, rows: int = 4, **changes: Any) -> PagedKVCacheManager:
    """A manager with runtime checks on; `changes` are of the params, or `max_seq_len`."""
    own = {k: changes.pop(k) for k in ("max_seq_len", "identity", "session") if k in changes}
    session = own.pop("session", None)
    return PagedKVCacheManager(
        make_params(**changes),
        session,
        pages,
        enable_runtime_checks=True,
        max_batch_size=rows,
        **own,
    )


def start(
    manager: PagedKVCacheManager,
    request_id: str,
    tokens: Any,
    replica_idx: int = 0,
    **changes: Any,
) -> TextContext:
    """A request that is claimed and owns its pages."""
    ctx = TextContext(request_id, tokens, **changes)
    manager.claim(request_id, replica_idx)
    manager.alloc(ctx, replica_idx)
    return ctx


def decode(manager: PagedKVCacheManager, ctx: TextContext, *tokens: int) -> None:
    """One step per token, as an engine does it: update, step, alloc."""
    for token in tokens:
        ctx.update(token)
        manager.step([ctx])
        manager.alloc(ctx)


def snapshot(manager: PagedKVCacheManager) -> Any:
    """All bookkeeping as plain values: two snapshots are equal iff nothing changed."""
    return {
        "turn": manager._turn,
        "claimed": {rid: _row(row) for rid, row in manager._claimed.items()},
        "replicas": [
            (
                list(replica.free_rows),
                replica.read_metrics(),
                [
                    (
                        list(leaf.pool.free_pages()),
                        list(leaf.pool.refs),
                        dict(leaf.pool.index),
                        list(leaf.pool.digests),
                        leaf.table.tolist(),
                    )
                    for leaf in replica.leaves
                ],
            )
            for replica in manager._replicas
        ],
    }


def _row(row: Any) -> Any:
    names = (
        "index phase pages passed capacity limit wake digests epoch committed counted prefill_end"
    )
    values = {name: getattr(row, name) for name in names.split()}
    return values | {"pages": [list(p) for p in row.pages], "passed": list(row.passed)}
