"""Plan the cache of a model: layers that store alike share a leaf.

Decision: layers are grouped by what their attention stores and sees (kv heads, head sizes,
window). One group is a single cache. Several groups are a tree, so that sliding layers hold only
their window's pages while full layers keep everything.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from kvgraph.contract.devices import PORTABLE, Device, Target
from kvgraph.contract.dtypes import QUANTIZED
from kvgraph.contract.manifest import LayerRef
from kvgraph.contract.params import (
    KVCacheParams,
    KVCacheQuantization,
    KVCacheStrategy,
)
from kvgraph.contract.trees import MultiKVCacheParams
from kvgraph.errors import UnsupportedError


@dataclass(frozen=True)
class LayerNeed:
    """The cache need of one layer: its heads, and its window in tokens (None: no window)."""

    n_kv_heads: int
    head_dim: int
    v_head_dim: int
    window_size: int | None = None
    reads: int | None = None
    """Index of the earlier layer whose keys and values this layer reads; None: it stores its own.
    """


@dataclass(frozen=True)
class CachePlan:
    """The cache's parameters, and for each model layer its leaf and its index in that leaf."""

    params: KVCacheParams | MultiKVCacheParams
    layers: tuple[LayerRef, ...]

    @classmethod
    def of(cls, params: KVCacheParams | MultiKVCacheParams) -> CachePlan:
        """The plan for given parameters; model layers fill the leaves in their order."""
        refs = (LayerRef(p, i) for p, leaf in params.leaves.items() for i in range(leaf.num_layers))
        return cls(params, tuple(refs))

    @property
    def strategy(self) -> KVCacheStrategy:
        """The cache strategy (paged, continuous or padded), which is equal in all leaves."""
        return next(iter(self.params.leaves.values())).cache_strategy

    @property
    def leaves(self) -> tuple[str, ...]:
        """Leaf paths in binding order; `("",)` for a single cache."""
        return tuple(self.params.leaves)


def require_target(
    params: KVCacheParams | MultiKVCacheParams, target: Target, ranks: int = 1
) -> None:
    """Raise UnsupportedError unless graphs for `ranks` devices of `target` can be bound on the
    devices of `params`."""
    if not isinstance(params, KVCacheParams | MultiKVCacheParams):
        raise UnsupportedError(f"params: expected KVCacheParams, got {type(params).__name__}")
    for leaf in params.leaves.values():
        leaf.require_kernels()
    if params.n_shards != ranks:
        wanted = "one device per replica" if ranks == 1 else f"{ranks} devices per replica (tp)"
        raise UnsupportedError(f"params.devices: expected {wanted}, got {params.n_shards} shards")
    for device in params.devices:
        known = device.arch is None or not target.archs or target.archs == (PORTABLE,)
        if device.kind != target.kind or not (known or device.arch in target.archs):
            raise UnsupportedError(
                f"params.devices: expected devices of target {str(target)!r}, got {device}; "
                f"pass devices=kvgraph.virtual_devices({str(target)!r})"
            )


def require_heads(architecture: str, layers: Sequence[LayerNeed], ranks: int) -> None:
    """Raise UnsupportedError unless the kv heads of each layer divide evenly among `ranks`.

    A rank gets an equal share of the heads or, if there are more ranks than heads, a copy of one.
    """
    for need in layers:
        if need.n_kv_heads % ranks and ranks % need.n_kv_heads:
            raise UnsupportedError(
                f"tp: expected ranks that divide the {need.n_kv_heads} kv heads of "
                f"{architecture!r}, or a multiple of them, got {ranks}"
            )


def of_one_replica(
    params: KVCacheParams | MultiKVCacheParams, kind: str, ranks: int = 1
) -> KVCacheParams | MultiKVCacheParams:
    """The same cache for one replica on devices 0 to `ranks` - 1 of `kind`.

    Devices and data-parallel degree of the deployment are left out.
    """
    if isinstance(params, MultiKVCacheParams):
        children = {name: of_one_replica(child, kind, ranks) for name, child in params.children}
        return MultiKVCacheParams.from_params(children)
    devices = tuple(Device(f"{kind}:{i}") for i in range(ranks))
    copied = params.allow_kv_head_replication or ranks > params.n_kv_heads
    return replace(
        params, devices=devices, data_parallel_degree=1, allow_kv_head_replication=copied
    )


def pool_types(dtype: str, cache_dtype: str | None) -> tuple[str, KVCacheQuantization | None]:
    """The `dtype` and `quantization` fields of a cache that stores `cache_dtype`.

    `dtype`: type of activations, and of the cache if `cache_dtype` is None.
    """
    if cache_dtype in QUANTIZED:
        return dtype, KVCacheQuantization(cache_dtype)  # type: ignore[arg-type]
    return cache_dtype or dtype, None


def plan_cache(
    layers: Sequence[LayerNeed],
    *,
    dtype: str,
    quantization: KVCacheQuantization | None,
    page_size: int,
    devices: Sequence[Device],
    strategy: KVCacheStrategy = KVCacheStrategy.PAGED,
) -> CachePlan:
    """Group `layers` into leaves. The pool's type is `dtype`, or that of `quantization` if given.

    A continuous or padded cache keeps whole sequences, so layers that differ only in their window
    share a leaf there. UnsupportedError if their heads differ.
    """
    if strategy is not KVCacheStrategy.PAGED:
        layers = [replace(layer, window_size=None) for layer in layers]
    storing = [layer for layer in layers if layer.reads is None]
    groups = list(dict.fromkeys(storing))
    if strategy is not KVCacheStrategy.PAGED and len(groups) > 1:
        raise UnsupportedError(
            f"cache: expected layers of one head layout for a {strategy} cache, got {groups}"
        )
    names = _leaf_names(groups)
    leaves = {
        names[group]: KVCacheParams(
            dtype=dtype,
            n_kv_heads=group.n_kv_heads,
            head_dim=group.head_dim,
            v_head_dim=group.v_head_dim,
            num_layers=storing.count(group),
            page_size=page_size,
            window_size=group.window_size,
            quantization=quantization and _of_head(quantization, group),
            cache_strategy=strategy,
            devices=tuple(devices),
            allow_kv_head_replication=len(devices) > group.n_kv_heads,
        )
        for group in groups
    }
    refs: list[LayerRef] = []
    seen = dict.fromkeys(names.values(), 0)
    for layer in layers:
        if layer.reads is not None:
            refs.append(refs[layer.reads])
            continue
        name = names[layer]
        refs.append(LayerRef(name, seen[name]))
        seen[name] += 1
    params = leaves[""] if len(groups) == 1 else MultiKVCacheParams.from_params(leaves)
    return CachePlan(params, tuple(refs))


def _of_head(quantization: KVCacheQuantization, layer: LayerNeed) -> KVCacheQuantization:
    """`quantization` with the fewest scales that the kernels take for the heads of `layer`.

    A head of up to `granularity` elements has one scale if K and V are equally wide. Other heads
    have one for each block: the largest that divides `granularity`, K and V. UnsupportedError if
    that block is so small that the pool would be larger than in 16 bits.
    """
    most, width = quantization.granularity, layer.head_dim
    if width <= most and layer.v_head_dim == width:
        return quantization
    block = math.gcd(most, width, layer.v_head_dim)
    if block < LEAST_BLOCK:
        raise UnsupportedError(
            f"cache dtype {quantization.dtype}: expected heads of a multiple of {LEAST_BLOCK} "
            f"elements, got {width} of keys and {layer.v_head_dim} of values"
        )
    return replace(quantization, granularity=block)


LEAST_BLOCK = 8
"""Fewest elements that may share a scale of 4 bytes."""


def as_paged(plan: CachePlan) -> CachePlan:
    """The same plan with a paged cache. `plan` must have a single leaf, as padded caches do."""
    (leaf,) = plan.params.leaves.values()
    return replace(plan, params=replace(leaf, cache_strategy=KVCacheStrategy.PAGED))


def _leaf_names(groups: Sequence[LayerNeed]) -> dict[LayerNeed, str]:
    """Leaf names: "full" or "sliding", numbered if several groups are of that kind; "" if there is
    one group in all."""
    if len(groups) == 1:
        return {groups[0]: ""}
    kinds = ["full" if group.window_size is None else "sliding" for group in groups]
    names = [
        kind if kinds.count(kind) == 1 else f"{kind}_{kinds[:i].count(kind)}"
        for i, kind in enumerate(kinds)
    ]
    return dict(zip(groups, names, strict=True))


def latent_notes(layers: Sequence[LayerNeed], config: object) -> tuple[str, ...]:
    """A note on the cost of a latent attention (MLA) that is cached as keys and values of all
    heads. `config`: the configuration of transformers' model; any other attention has no note."""
    rank = getattr(config, "kv_lora_rank", None)
    if not rank:
        return ()
    latent = rank + (getattr(config, "qk_rope_head_dim", None) or 0)
    need = layers[0]
    expanded = need.n_kv_heads * (need.head_dim + need.v_head_dim)
    return (
        f"cache: latent attention (MLA) is kept as keys and values: {expanded} elements of a token "
        f"in a layer, {expanded / latent:.1f} times its latent {latent}",
    )
