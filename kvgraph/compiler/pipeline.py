"""The stages of a compile: what was asked for, the model, its cache, and its lowering."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvgraph.compiler.cache import (
    CachePlan,
    of_one_shard,
    plan_cache,
    pool_types,
    require_target,
)
from kvgraph.compiler.frontends.folder import checkpoint_dtype, read_config
from kvgraph.compiler.targets import Lowered
from kvgraph.contract.backends import Backend, default_backend, find_backend, imported
from kvgraph.contract.devices import PORTABLE, Target, virtual_devices
from kvgraph.contract.dims import BATCH_SIZE, TOTAL_SEQ_LEN
from kvgraph.contract.dtypes import ACTIVATIONS, POOLS
from kvgraph.contract.params import (
    KVCacheParams,
    KVCacheStrategy,
)
from kvgraph.contract.signature import GraphSignature
from kvgraph.contract.symbols import MAX_EXTENTS
from kvgraph.contract.trees import MultiKVCacheParams
from kvgraph.errors import MissingDependencyError, UnsupportedError
from kvgraph.kv.null import NullKVCacheManager
from kvgraph.ops._linear import WEIGHT_BITS

if TYPE_CHECKING:
    from torch import nn

    from kvgraph.compiler.model import Model
    from kvgraph.compiler.traced import Traced

MAX_PAGE_SIZE = 1 << 16
DEFAULT_PAGE_SIZE = 128
DEFAULT_MAX_BATCH, DEFAULT_MAX_TOKENS = 256, 8192
"""Of a step, for a backend whose graph bounds it."""

Progress = Callable[[str], None]


def resolve(
    target: str, backend: str | None, cache: str, cache_dtype: str | None, page_size: int
) -> tuple[Target, Backend]:
    """The parsed target and the backend: the target's default, where none is asked for."""
    parsed = Target.parse(target)
    if parsed.kind == "cpu" and parsed.archs:
        raise UnsupportedError(f"target: expected 'cpu' without an instruction set, got {target!r}")
    kind = parsed.kind
    chosen = default_backend(kind) if backend is None else find_backend(backend, kind)
    if parsed.archs == (PORTABLE,) and not chosen.portable:
        raise UnsupportedError(
            f"target: expected architectures for backend {chosen.name}, got {target!r}"
        )
    if cache not in list(KVCacheStrategy):
        kinds = [str(kind) for kind in KVCacheStrategy]
        raise UnsupportedError(f"cache: expected one of {kinds}, got {cache!r}")
    known = list(POOLS if cache == KVCacheStrategy.PAGED else ACTIVATIONS)
    if cache_dtype is not None and cache_dtype not in known:
        raise UnsupportedError(
            f"cache_dtype: expected one of {known} for a {cache} cache, got {cache_dtype!r}"
        )
    _require_page_size(page_size)
    return parsed, chosen


def require_params(params: KVCacheParams | MultiKVCacheParams, target: Target) -> None:
    """UnsupportedError for params that no graph for `target` can be bound with."""
    require_target(params, target)
    _require_page_size(params.page_size)


def _require_page_size(page_size: int) -> None:
    if not 1 <= page_size <= MAX_PAGE_SIZE:
        raise UnsupportedError(
            f"page_size: expected 1 to {MAX_PAGE_SIZE} tokens from the cpu kernels, got {page_size}"
        )


def step_bounds(
    backend: Backend, target: Target, max_batch: int | None, max_tokens: int | None
) -> tuple[int, int]:
    """Rows and new tokens of a step at most, the defaults filled in.

    UnsupportedError for one that is out of range, or given to a backend that bounds no step.
    """
    for name, value in (("max_batch", max_batch), ("max_tokens", max_tokens)):
        if value is not None and "bounds" not in backend.targets[target.kind].options:
            raise UnsupportedError(
                f"{name}: expected none for backend {backend.name}, whose graph takes steps of any "
                f"size, got {value}"
            )
    if max_batch is not None:
        _require_range("max_batch", max_batch, 1, MAX_EXTENTS[BATCH_SIZE])
    tokens = DEFAULT_MAX_TOKENS if max_tokens is None else max_tokens
    _require_range("max_tokens", tokens, max_batch or 1, MAX_EXTENTS[TOTAL_SEQ_LEN])
    return min(DEFAULT_MAX_BATCH, tokens) if max_batch is None else max_batch, tokens


def _require_range(name: str, value: int, least: int, most: int) -> None:
    if not least <= value <= most:
        raise UnsupportedError(f"{name}: expected {least} to {most}, got {value}")


def reason(target: Target) -> str:
    """Why the default backend of a target is its default: the end of a sentence."""
    kind = target.kind
    return f", the default for {kind}: {default_backend(kind).targets[kind].reason}"


def load_model(
    model: str | Path | nn.Module,
    float32: bool,
    dtype: str | None,
    vocab_size: int | None,
    max_seq_len: int | None,
    weightless: bool,
    text: Mapping[str, Any],
) -> tuple[Model, list[str]]:
    """The model in a dtype that the backend computes in, and what was converted.

    `float32`: it computes in nothing else, as ONNX Runtime's CPU kernels.
    `weightless`: a checkpoint's weights stay where they are, if they can.
    """
    if dtype is not None and dtype not in ACTIVATIONS:
        raise UnsupportedError(f"dtype: expected one of {list(ACTIVATIONS)}, got {dtype!r}")
    _require_torch()
    from kvgraph.compiler.frontends import huggingface, module

    if not isinstance(model, str | Path):
        loaded = module.load(
            model, vocab_size=vocab_size, max_seq_len=max_seq_len, dtype=dtype, **text
        )
        if float32 and loaded.dtype != "float32":
            raise UnsupportedError(
                "dtype: expected float32 activations for backend onnx on cpu and for packed "
                f"weights, got {loaded.dtype}"
            )
        return loaded, []
    folder = Path(model)
    given = [name for name, value in text.items() if value is not None]
    if given:
        raise UnsupportedError(
            f"{given[0]}: expected None for a model folder, which has its own, got "
            f"{text[given[0]]!r}"
        )
    wanted = dtype or checkpoint_dtype(read_config(folder))
    if float32 and wanted != "float32":
        note = (
            f"activations: {wanted} converted to float32, since the CPU kernels compute in it "
            "(the pool's dtype is --cache-dtype, that of weights --weights)"
        )
        return replace(huggingface.load(folder, "float32"), stored_dtype=wanted), [note]
    loaded = huggingface.load(folder, wanted, weightless=weightless)
    return loaded, [f"weights: passed through memory: {loaded.loaded}"] if loaded.loaded else []


def _require_torch() -> None:
    try:
        import torch  # noqa: F401
    except ImportError as error:
        raise MissingDependencyError(
            "torch: needed to compile, not installed; pip install 'kvgraph[compile]'"
        ) from error


def plan_for(
    model: Model,
    params: KVCacheParams | MultiKVCacheParams | None,
    cache: str,
    cache_dtype: str | None,
    page_size: int,
    target: Target,
) -> CachePlan:
    """Where the layers' caches are: as given, or as the model's attention needs them."""
    if params is not None:
        return CachePlan.of(of_one_shard(params, target.kind))
    if not model.layers:
        raise UnsupportedError("params: expected KVCacheParams to compile an nn.Module, got None")
    dtype, quantization = pool_types(model.dtype, cache_dtype)
    return plan_cache(
        model.layers,
        dtype=dtype,
        quantization=quantization,
        page_size=page_size,
        devices=virtual_devices(str(target)),
        strategy=KVCacheStrategy(cache),
    )


def describe(model: Model, plan: CachePlan) -> GraphSignature:
    """The graph's signature over the symbols of a manager that allocates nothing; the model learns
    where its layers' caches are."""
    manager = NullKVCacheManager(
        plan.params,
        max_batch_size=1,
        max_seq_len=model.max_seq_len,
        num_layers=len(plan.layers),
        devices=plan.params.devices,
        session=None,
        available_cache_memory=0,
        page_size=plan.params.page_size,
    )
    model.place(plan)
    return GraphSignature.of(manager.get_symbolic_inputs()[0], model.vocab_size)


def lower(backend: Callable[..., Lowered], traced: Traced, folder: Path) -> Lowered:
    """What `lowering` gave, over a trace. UnsupportedError for an operator that ONNX lacks."""
    import torch.onnx

    try:
        return backend(traced, folder)
    except torch.onnx.OnnxExporterError as error:
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        raise UnsupportedError(
            f"architecture {traced.model.architecture!r}: expected operators that the onnx "
            f"exporter has, got one that it has not: {str(cause).splitlines()[0]}"
        ) from error


def lowering(
    backend: Backend,
    target: Target,
    weights: str | None,
    bounds: tuple[int, int],
    progress: Progress,
) -> Callable[..., Any]:
    """The backend's `lower` with the options that it takes."""
    support = backend.targets[target.kind]
    known = {
        "archs": target.archs,
        "bounds": bounds,
        "progress": progress,
        "weight_bits": WEIGHT_BITS.get(weights or ""),
    }
    return partial(imported(support.lower), **{name: known[name] for name in support.options})


def require_kernels(plan: CachePlan, target: Target, backend: Backend) -> None:
    """UnsupportedError for a cache that the backend's kernels do not support."""
    require = backend.targets[target.kind].require
    if not require:
        return
    if plan.strategy is not KVCacheStrategy.PAGED:
        raise UnsupportedError(
            f"cache: expected 'paged' for target {target.kind}, got '{plan.strategy}'"
        )
    imported(require)(plan, target.archs)
