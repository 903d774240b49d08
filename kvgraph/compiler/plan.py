"""How a model and its cache fit into a device's memory, from its configuration alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from torch import nn

from kvgraph.compiler.cache import plan_cache, pool_types
from kvgraph.compiler.frontends import huggingface
from kvgraph.compiler.packed_weights import Packed, pack
from kvgraph.compiler.passes.fuse_rope import TABLE_BYTES
from kvgraph.compiler.pipeline import BACKENDS, check_weights, default_weights, in_float32
from kvgraph.contract.devices import Target, virtual_devices
from kvgraph.contract.dims import ceildiv
from kvgraph.errors import ParamsError
from kvgraph.kv.memory import plan_leaves
from kvgraph.kv.null import NullKVCacheManager
from kvgraph.ops._linear import COLUMNS, DEPTH, WEIGHT_BITS

FREQUENCIES = "inv_freq"
"""How the name of a rotary embedding's frequencies ends in transformers."""
OF_LENGTH = ("dynamic", "longrope")
"""Rotary embeddings that depend on a step's length: no table by position holds them."""


@dataclass(frozen=True)
class Plan:
    """All sizes in bytes, of one device; activations and the graph itself are not counted."""

    architecture: str
    target: str
    dtype: str
    """Of activations."""
    cache_dtype: str
    memory: int
    weights: int
    """What the target's default backend stores of them, with rotary tables."""
    weights_dtype: str
    """fp32, bf16, int8 or int4 on a CPU; elsewhere the activations' dtype."""
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
    weights: str | None = None,
    cache_dtype: str | None,
    page_size: int,
) -> Plan:
    """Plan one device of `memory` bytes for the checkpoint in `folder`.

    `dtype` and `weights` mean what they mean to `compile` with the target's default backend. The
    cache is described by a NullKVCacheManager on a virtual device; no weight is read and nothing
    is allocated. ParamsError where the weights alone do not fit, or not one page does;
    UnsupportedError for weights that the target cannot have, as `compile` raises it.
    """
    parsed = Target.parse(target)
    check_weights(weights, parsed, dtype)
    dtype = dtype or huggingface.checkpoint_dtype(folder)
    if in_float32(parsed, BACKENDS[parsed.kind][0], weights):
        weights, dtype = weights or default_weights(dtype), "float32"
    model = huggingface.describe(folder, dtype)
    weight_bytes = _weight_bytes(model.module, WEIGHT_BITS.get(weights or ""))
    weight_bytes += sum(_rotary_tables(model.module, model.max_seq_len))
    pool_dtype, quantization = pool_types(dtype, cache_dtype)
    cache = plan_cache(
        model.layers,
        dtype=pool_dtype,
        quantization=quantization,
        page_size=page_size,
        devices=virtual_devices(target),
    )
    available = memory - weight_bytes
    if available <= 0:
        raise ParamsError(
            f"memory: expected more than the {weight_bytes} bytes of weights, got {memory}"
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
        weights=weight_bytes,
        weights_dtype=weights or dtype,
        cache_memory=planned.nbytes,
        page_size=page_size,
        pages=planned.pages,
        bytes_per_page={path: leaf.bytes_per_page for path, leaf in leaves.items()},
        max_seq_len=length,
        concurrent_requests=planned.max_concurrent_requests,
        longest_context=min(model.max_seq_len, tokens),
    )


def _weight_bytes(module: nn.Module, bits: int | None) -> int:
    """Of the parameters as they are, or with linear layers packed and tables in bfloat16.

    Packed, a router that is a linear layer counts as one; it keeps its few bytes (pack_linear).
    """
    if bits is None:
        return sum(p.numel() * p.element_size() for p in module.parameters())
    linears = [layer for layer in module.modules() if isinstance(layer, nn.Linear)]
    tables = {layer.weight for layer in module.modules() if isinstance(layer, nn.Embedding)}
    other = set(module.parameters()) - tables - {p for layer in linears for p in layer.parameters()}
    tile = pack([np.zeros((COLUMNS, DEPTH), np.float32)], bits)
    return (
        sum(_packed_bytes(layer, tile) for layer in linears)
        + sum(table.numel() * 2 for table in tables)
        + sum(p.numel() * p.element_size() for p in other)
    )


def _packed_bytes(layer: nn.Linear, tile: Packed) -> int:
    """`tile`: a panel that is `DEPTH` deep, as `pack` makes it."""
    panels, tiles = ceildiv(layer.out_features, COLUMNS), ceildiv(layer.in_features, DEPTH)
    bias = 4 * COLUMNS if layer.bias is not None else 0
    deep = tile.weight.nbytes + (tile.multipliers.nbytes if tile.multipliers is not None else 0)
    flat = bias + (tile.scales.nbytes if tile.scales is not None else 0)
    return panels * (tiles * deep + flat)


def _rotary_tables(module: nn.Module, positions: int) -> Iterator[int]:
    """Bytes of each table of cosines and sines by position that fuse_rope makes."""
    for embedding in module.modules():
        kinds = getattr(embedding, "rope_type", None)
        for name, frequencies in embedding.named_buffers(recurse=False):
            layer_type = name.removesuffix(FREQUENCIES).removesuffix("_")
            if not name.endswith(FREQUENCIES) or layer_type.endswith("original"):
                continue
            kind = kinds.get(layer_type) if isinstance(kinds, dict) else kinds
            nbytes = positions * 2 * frequencies.numel() * 4
            if kind not in OF_LENGTH and nbytes <= TABLE_BYTES:
                yield nbytes
