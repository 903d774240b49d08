"""How a model and its cache fit into a device's memory, from its configuration alone."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kvgraph.compiler.cache import plan_cache, pool_types
from kvgraph.compiler.frontends import huggingface
from kvgraph.contract.devices import virtual_devices
from kvgraph.errors import ParamsError
from kvgraph.kv.memory import plan_leaves
from kvgraph.kv.null import NullKVCacheManager


@dataclass(frozen=True)
class Plan:
    """All sizes in bytes, of one device; activations and the graph itself are not counted."""

    architecture: str
    target: str
    dtype: str
    cache_dtype: str
    memory: int
    weights: int
    cache_memory: int
    page_size: int
    pages: dict[str, int]
    """By leaf; the empty path is the only cache."""
    bytes_per_page: dict[str, int]
    max_seq_len: int
    concurrent_requests: int
    """Requests of `max_seq_len` tokens that fit at once."""
    longest_context: int
    """Tokens of a lone request, at most the model's own limit."""


def plan_deployment(
    folder: Path,
    *,
    target: str,
    memory: int,
    max_seq_len: int | None,
    max_batch_size: int,
    max_batch_tokens: int = 2048,
    dtype: str | None,
    cache_dtype: str | None,
    page_size: int,
) -> Plan:
    """Plan one device of `memory` bytes for the checkpoint in `folder`.

    The cache is described by a NullKVCacheManager on a virtual device; no weight is read and
    nothing is allocated. ParamsError where the weights alone do not fit, or not one page does.
    """
    dtype = dtype or huggingface.checkpoint_dtype(folder)
    model = huggingface.describe(folder, dtype)
    pool_dtype, quantization = pool_types(dtype, cache_dtype)
    cache = plan_cache(
        model.layers,
        dtype=pool_dtype,
        quantization=quantization,
        page_size=page_size,
        devices=virtual_devices(target),
    )
    available = memory - model.weight_bytes
    if available <= 0:
        raise ParamsError(
            f"memory: expected more than the {model.weight_bytes} bytes of weights, got {memory}"
        )
    length = model.max_seq_len if max_seq_len is None else max_seq_len
    if not 1 <= length <= model.max_seq_len:
        raise ParamsError(
            f"max_seq_len: expected 1 to {model.max_seq_len} from the model, got {length}"
        )
    manager = NullKVCacheManager(
        cache.params,
        max_batch_size,
        length,
        len(cache.layers),
        cache.params.devices,
        None,
        available,
        page_size,
    )
    planned = plan_leaves(manager.params, available, max_batch_size, length, max_batch_tokens)
    leaves = manager.params.leaves
    unbounded = [p for p, leaf in leaves.items() if leaf.window_size is None]
    tokens = min((planned.pages[p] * page_size for p in unbounded), default=model.max_seq_len)
    return Plan(
        architecture=model.architecture,
        target=target,
        dtype=dtype,
        cache_dtype=cache_dtype or dtype,
        memory=memory,
        weights=model.weight_bytes,
        cache_memory=planned.nbytes,
        page_size=page_size,
        pages=planned.pages,
        bytes_per_page={path: leaf.bytes_per_page for path, leaf in leaves.items()},
        max_seq_len=length,
        concurrent_requests=planned.max_concurrent_requests,
        longest_context=min(model.max_seq_len, tokens),
    )
