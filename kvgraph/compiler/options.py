"""Resolve or refuse the options of a compile, before a model is read."""

from __future__ import annotations

from dataclasses import dataclass

from kvgraph.compiler.cache import require_target
from kvgraph.contract.backends import OURS, Backend, Support, default_backend, find_backend
from kvgraph.contract.devices import PORTABLE, Target
from kvgraph.contract.dims import BATCH_SIZE, TOTAL_SEQ_LEN
from kvgraph.contract.dtypes import ACTIVATIONS, GPU_WEIGHTS, POOLS, WEIGHTS
from kvgraph.contract.params import DEFAULT_PAGE_SIZE, KVCacheParams, KVCacheStrategy
from kvgraph.contract.shards import MOST_SHARDS
from kvgraph.contract.symbols import MAX_EXTENTS
from kvgraph.contract.trees import MultiKVCacheParams
from kvgraph.errors import UnsupportedError

MAX_PAGE_SIZE = 1 << 16
DEFAULT_MAX_BATCH, DEFAULT_MAX_TOKENS = 256, 8192
"""Default most rows and most new tokens of a step, for backends with bounds in their graphs."""


@dataclass(frozen=True)
class CompileRequest:
    """The resolved options of a compile."""

    target: Target
    backend: Backend
    bounds: tuple[int, int]
    """Most rows and most new tokens of a step."""
    ranks: int
    """Number of processes that will run the artifact together."""
    cache: str
    cache_dtype: str | None
    """dtype of the pool; None: the one of `params`, or the activations' dtype."""
    page_size: int
    weights: str | None
    """How linear layers and experts are stored, as the user asked; None: `settled_weights`."""
    why_default: str
    """Why the target's default backend is its default, as the end of a sentence; empty if the user
    chose the backend."""

    @property
    def support(self) -> Support:
        return self.backend.targets[self.target.kind]

    @property
    def float32(self) -> bool:
        """Whether activations are float32 for a checkpoint of any dtype. Packed weights on a CPU
        need float32 activations."""
        return self.support.float32 or (self.weights is not None and self.target.kind == "cpu")

    def settled_weights(self, stored_dtype: str, *, is_quantized: bool) -> str | None:
        """`weights`, or the default for a checkpoint of `stored_dtype`; None: the activations'
        dtype.

        UnsupportedError if `weights` is "stored" and the checkpoint is not quantised.
        """
        if self.weights == "stored" and not is_quantized:
            raise UnsupportedError(
                "weights: expected a checkpoint whose weights are in fewer bits for 'stored', got "
                f"a plain one; others are {[name for name in WEIGHTS if name != 'stored']}"
            )
        on_cpu, packs = self.target.kind == "cpu", "weight_bits" in self.support.options
        if self.weights is not None or (on_cpu and not self.float32):
            return self.weights
        if packs and is_quantized:
            return "stored"
        if not on_cpu:
            return None
        return "bf16" if packs and stored_dtype == "bfloat16" else "fp32"


def resolve(
    target: str,
    backend: str | None,
    *,
    dtype: str | None = None,
    weights: str | None = None,
    cache: str | None = None,
    cache_dtype: str | None,
    page_size: int | None,
    params: KVCacheParams | MultiKVCacheParams | None = None,
    max_batch_size: int | None = None,
    max_batch_tokens: int | None = None,
    tp: int = 1,
) -> CompileRequest:
    """Fill in defaults and return the CompileRequest.

    UnsupportedError or ParamsError: no graph for the target supports an option, or an option
    contradicts `params`.
    """
    parsed, chosen = _target_and_backend(target, backend)
    check_weights(weights, parsed, chosen, dtype)
    if params is not None:
        require_target(params, parsed, tp)
        _require_agreement(params, cache, cache_dtype, page_size)
        cache, page_size = params.cache_strategy, params.page_size
    cache = KVCacheStrategy.PAGED if cache is None else cache
    page_size = DEFAULT_PAGE_SIZE if page_size is None else page_size
    _require_cache(cache, cache_dtype)
    _require_page_size(page_size)
    require_ranks(tp, chosen, parsed, cache)
    bounds = _step_bounds(chosen, parsed, max_batch_size, max_batch_tokens)
    why_default = _why_default(parsed) if backend is None else ""
    return CompileRequest(
        parsed, chosen, bounds, tp, cache, cache_dtype, page_size, weights, why_default
    )


def _target_and_backend(target: str, backend: str | None) -> tuple[Target, Backend]:
    parsed = Target.parse(target)
    if parsed.kind == "cpu" and parsed.archs:
        raise UnsupportedError(f"target: expected 'cpu' without an instruction set, got {target!r}")
    kind, is_portable = parsed.kind, parsed.archs == (PORTABLE,)
    if backend is None and is_portable:
        return parsed, next(each for each in OURS if each.portable)
    chosen = default_backend(kind) if backend is None else find_backend(backend, kind)
    if is_portable and not chosen.portable:
        raise UnsupportedError(
            f"target: expected architectures for backend {chosen.name}, got {target!r}"
        )
    return parsed, chosen


def _require_agreement(
    params: KVCacheParams | MultiKVCacheParams,
    cache: str | None,
    cache_dtype: str | None,
    page_size: int | None,
) -> None:
    """Raise UnsupportedError if an option contradicts `params`."""
    for leaf in params.leaves.values():
        pool = leaf.quantization.dtype if leaf.quantization else leaf.dtype
        for name, given, own in (
            ("cache", cache, leaf.cache_strategy),
            ("cache_dtype", cache_dtype, pool),
            ("page_size", page_size, leaf.page_size),
        ):
            if given is not None and given != own:
                raise UnsupportedError(
                    f"{name}: expected {own} from params, got {given}; leave it out with params"
                )


def _require_cache(cache: str, cache_dtype: str | None) -> None:
    if cache not in list(KVCacheStrategy):
        kinds = [str(kind) for kind in KVCacheStrategy]
        raise UnsupportedError(f"cache: expected one of {kinds}, got {cache!r}")
    known = list(POOLS if cache == KVCacheStrategy.PAGED else ACTIVATIONS)
    if cache_dtype is not None and cache_dtype not in known:
        raise UnsupportedError(
            f"cache_dtype: expected one of {known} for a {cache} cache, got {cache_dtype!r}"
        )


def require_ranks(
    tp: int, backend: Backend, target: Target, cache: str = KVCacheStrategy.PAGED
) -> None:
    """Raise UnsupportedError if the backend, or the kind of cache, cannot have `tp` ranks."""
    if not 1 <= tp <= MOST_SHARDS:
        raise UnsupportedError(f"tp: expected 1 to {MOST_SHARDS} ranks, got {tp}")
    if tp > 1 and not backend.targets[target.kind].ranks:
        raise UnsupportedError(
            f"tp: expected 1 for backend {backend.name} on {target.kind}, which has no collectives "
            f"yet, got {tp}"
        )
    if tp > 1 and cache != KVCacheStrategy.PAGED:
        raise UnsupportedError(f"cache: expected 'paged' for {tp} ranks, got {cache!r}")


def _require_page_size(page_size: int) -> None:
    if not 1 <= page_size <= MAX_PAGE_SIZE:
        raise UnsupportedError(f"page_size: expected 1 to {MAX_PAGE_SIZE} tokens, got {page_size}")


def _step_bounds(
    backend: Backend, target: Target, max_batch_size: int | None, max_batch_tokens: int | None
) -> tuple[int, int]:
    """Most rows and most new tokens of a step, with defaults filled in.

    UnsupportedError: a value is out of range, or the backend has no bounds.
    """
    for name, value in (("max_batch_size", max_batch_size), ("max_batch_tokens", max_batch_tokens)):
        if value is not None and "bounds" not in backend.targets[target.kind].options:
            raise UnsupportedError(
                f"{name}: expected none for backend {backend.name}, whose graph takes steps of any "
                f"size, got {value}"
            )
    if max_batch_size is not None:
        _require_range("max_batch_size", max_batch_size, 1, MAX_EXTENTS[BATCH_SIZE])
    tokens = DEFAULT_MAX_TOKENS if max_batch_tokens is None else max_batch_tokens
    _require_range("max_batch_tokens", tokens, max_batch_size or 1, MAX_EXTENTS[TOTAL_SEQ_LEN])
    return min(DEFAULT_MAX_BATCH, tokens) if max_batch_size is None else max_batch_size, tokens


def _require_range(name: str, value: int, least: int, most: int) -> None:
    if not least <= value <= most:
        raise UnsupportedError(f"{name}: expected {least} to {most}, got {value}")


def _why_default(target: Target) -> str:
    kind = target.kind
    if target.archs == (PORTABLE,):
        return f", the only one for {target}"
    return f", the default for {kind}: {default_backend(kind).targets[kind].default_because}"


def check_weights(weights: str | None, target: Target, backend: Backend, dtype: str | None) -> None:
    """Raise UnsupportedError if the target or activations of `dtype` do not allow these weights."""
    if weights is None:
        return
    if weights not in WEIGHTS:
        raise UnsupportedError(f"weights: expected one of {list(WEIGHTS)}, got {weights!r}")
    if "weight_bits" not in backend.targets[target.kind].options:
        where = f" on {target.kind}" if len(backend.targets) > 1 else ""
        raise UnsupportedError(
            f"weights: expected none for backend {backend.name}{where}, which packs none, got "
            f"{weights!r}"
        )
    if target.kind != "cpu":
        if weights not in GPU_WEIGHTS:
            raise UnsupportedError(
                f"weights: expected one of {list(GPU_WEIGHTS)} for target {target.kind}, where "
                f"others have the activations' --dtype, got {weights!r}"
            )
        return
    if dtype not in (None, "float32"):
        raise UnsupportedError(
            f"dtype: expected float32 activations with weights {weights!r}, got {dtype!r}; "
            "leave it out with such weights"
        )
