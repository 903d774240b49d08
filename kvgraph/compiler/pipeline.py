"""The stages of a compile after its options: read the model, describe the cache, and lower."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvgraph.compiler.cache import (
    CachePlan,
    LayerNeed,
    of_one_replica,
    plan_cache,
    pool_types,
    require_heads,
)
from kvgraph.compiler.frontends.folder import checkpoint_dtype, read_config
from kvgraph.compiler.frontends.gguf import as_folder
from kvgraph.compiler.options import CompileRequest
from kvgraph.compiler.quiet import first_line
from kvgraph.compiler.targets import Lowered
from kvgraph.contract.backends import ONNX_TOOLS, imported
from kvgraph.contract.devices import virtual_devices
from kvgraph.contract.dtypes import ACTIVATIONS, WEIGHT_BITS
from kvgraph.contract.files import as_path
from kvgraph.contract.loading import require_package
from kvgraph.contract.params import (
    KVCacheParams,
    KVCacheStrategy,
)
from kvgraph.contract.signature import GraphSignature
from kvgraph.contract.trees import MultiKVCacheParams
from kvgraph.errors import MissingDependencyError, UnsupportedError
from kvgraph.kv.null import NullKVCacheManager
from kvgraph.ops.torch_threads import fitting_threads
from kvgraph.progress import Progress

if TYPE_CHECKING:
    from torch import nn

    from kvgraph.compiler.model import Model
    from kvgraph.compiler.traced import Traced


def require_rankable(model: str | Path | nn.Module, ranks: int) -> None:
    """Raise UnsupportedError for several ranks if `model` is the caller's own module."""
    if ranks > 1 and not isinstance(model, str | Path):
        raise UnsupportedError(
            "tp: expected a checkpoint folder, whose model has a plan for tensor parallelism, "
            f"got an nn.Module ({type(model).__name__})"
        )


@contextmanager
def opened(model: str | Path | nn.Module) -> Iterator[Path | nn.Module]:
    """The model as a checkpoint folder, or as a module with training modes restored at the end."""
    if isinstance(model, str | Path):
        with as_folder(as_path("model", model)) as folder:
            yield folder
        return
    parts = list(model.modules()) if hasattr(type(model), "modules") else []
    trains = [part.training for part in parts]
    try:
        yield model
    finally:
        for part, is_training in zip(parts, trains, strict=True):
            part.training = is_training


def load_model(
    model: Path | nn.Module,
    *,
    float32: bool,
    weightless: bool,
    dtype: str | None = None,
    vocab_size: int | None = None,
    max_seq_len: int | None = None,
    tokenizer: str | Path | None = None,
    eos_token_ids: int | Iterable[int] | None = None,
    bos_token_id: int | None = None,
) -> tuple[Model, list[str]]:
    """The model in a dtype that the backend computes in, and notes on conversions.

    `float32`: the backend computes in float32 only, as ONNX Runtime's CPU kernels do.
    `weightless`: a checkpoint's weights stay on disk, if that is possible.
    `vocab_size`, `tokenizer`, `eos_token_ids`, `bos_token_id`: for an nn.Module alone.
    """
    if dtype is not None and dtype not in ACTIVATIONS:
        raise UnsupportedError(f"dtype: expected one of {list(ACTIVATIONS)}, got {dtype!r}")
    _fit_threads()
    from kvgraph.compiler.frontends import huggingface, module

    if not isinstance(model, Path):
        loaded = module.load(
            model,
            vocab_size=vocab_size,
            max_seq_len=max_seq_len,
            dtype=dtype,
            tokenizer=tokenizer,
            eos_token_ids=eos_token_ids,
            bos_token_id=bos_token_id,
        )
        if loaded.dtype not in ACTIVATIONS:
            raise UnsupportedError(
                f"model: expected a module in one of {list(ACTIVATIONS)}, got one in "
                f"{loaded.dtype}; give module.float()"
            )
        if float32 and loaded.dtype != "float32":
            raise UnsupportedError(
                "model: expected float32 activations for backend onnx on cpu and for packed "
                f"weights, got a module in {loaded.dtype}; give module.float(), or backend 'torch'"
            )
        return loaded, []
    of_module = {
        "vocab_size": vocab_size,
        "tokenizer": tokenizer,
        "eos_token_ids": eos_token_ids,
        "bos_token_id": bos_token_id,
    }
    for name, value in of_module.items():
        if value is not None:
            raise UnsupportedError(
                f"{name}: expected None for a model folder, which has its own, got {value!r}"
            )
    wanted = dtype or checkpoint_dtype(read_config(model))
    if not float32 and wanted not in ACTIVATIONS:
        raise UnsupportedError(
            f"{model}: dtype: expected one of {list(ACTIVATIONS)} in config.json, got {wanted!r}; "
            "give one with --dtype"
        )
    if float32 and wanted != "float32":
        note = (
            f"activations: {wanted} converted to float32, since the CPU kernels compute in it "
            "(the pool's dtype is --cache-dtype, that of weights --weights)"
        )
        loaded = huggingface.load(model, "float32", max_seq_len=max_seq_len, weightless=weightless)
        loaded, notes = replace(loaded, stored_dtype=wanted), [note]
    else:
        loaded = huggingface.load(model, wanted, max_seq_len=max_seq_len, weightless=weightless)
        notes = []
    if loaded.loaded:
        notes.append(f"weights: passed through memory: {loaded.loaded}")
    return loaded, notes


def require_tools(tools: Sequence[str]) -> None:
    """Raise MissingDependencyError if one of `tools`, distributions, is not installed though it is
    of the extra `compile`. It does not import them."""
    for tool in tools:
        if tool in ONNX_TOOLS and find_spec(tool.replace("-", "_")) is None:
            raise MissingDependencyError(
                f"{tool}: needed to compile, not installed; pip install 'kvgraph[compile]'"
            )


def _fit_threads() -> None:
    torch = require_package("torch", "needed to compile", "pip install 'kvgraph[compile]'")
    if threads := fitting_threads(None):
        torch.set_num_threads(threads)


def plan_for(
    model: Model,
    params: KVCacheParams | MultiKVCacheParams | None,
    request: CompileRequest,
) -> CachePlan:
    """The cache plan for one device, from `params` or from what the model's attention stores.

    UnsupportedError: the ranks cannot share the model's heads, or `params` has another number of
    layers.
    """
    target = request.target
    require_heads(model.architecture, model.layers, request.ranks)
    if params is not None:
        plan = CachePlan.of(of_one_replica(params, target.kind))
        if not model.is_own and len(plan.layers) != len(model.layers):
            raise UnsupportedError(
                f"params: num_layers: expected {len(model.layers)} from {model.architecture!r}, "
                f"got {len(plan.layers)}"
            )
        return plan
    if model.is_own:
        raise UnsupportedError("params: expected KVCacheParams to compile an nn.Module, got None")
    dtype, quantization = pool_types(model.dtype, request.cache_dtype)
    return plan_cache(
        model.layers,
        dtype=dtype,
        quantization=quantization,
        page_size=request.page_size,
        devices=virtual_devices(str(target)),
        strategy=KVCacheStrategy(request.cache),
    )


def describe(model: Model, plan: CachePlan) -> GraphSignature:
    """The graph's signature, from the symbols of a cache manager that allocates nothing.

    It also gives the model the places of its layers' caches.
    """
    manager = NullKVCacheManager(
        plan.params,
        max_batch_size=1,
        max_seq_len=model.max_seq_len,
        num_layers=sum(leaf.num_layers for leaf in plan.params.leaves.values()),
        devices=plan.params.devices,
        session=None,
        available_cache_memory=0,
        page_size=plan.params.page_size,
    )
    model.place(plan)
    return GraphSignature.of(manager.get_symbolic_inputs()[0], model.vocab_size)


def notes_of_widened(model: Model, weights: str | None, request: CompileRequest) -> list[str]:
    """A note if the weights of a quantised checkpoint get the activations' dtype; else empty.

    `weights`: the settled option.
    """
    if not model.is_quantized or weights is not None:
        return []
    can_pack = "weight_bits" in request.support.options
    packs = "packs weights only with --weights" if can_pack else "packs no weights"
    where = f"backend {request.backend.name} on {request.target.kind}"
    return [f"weights: widened from the checkpoint's to {model.dtype}, since {where} {packs}"]


def notes_of_ranks(layers: Sequence[LayerNeed], ranks: int) -> list[str]:
    """A note if ranks hold copies of kv heads; else empty."""
    heads = min((need.n_kv_heads for need in layers), default=ranks)
    if heads >= ranks:
        return []
    return [
        f"kv heads: {heads} in a layer are fewer than the {ranks} ranks, so the pool holds each "
        f"{ranks // heads} times"
    ]


def trace_ranks(traced: Traced, kind: str, ranks: int, *, functional: bool) -> Iterator[Traced]:
    """Cut the model of `traced` for each of `ranks` devices of `kind`, and trace it again.

    Graphs of all ranks are equal; parameters, and the buffers that say which part a rank has, are
    not.
    """
    from kvgraph.compiler.frontends.ranks import cut
    from kvgraph.compiler.trace import trace

    params = of_one_replica(traced.plan.params, kind, ranks)
    plan = replace(traced.plan, params=params)
    for rank in range(ranks):
        own = cut(traced.model, ranks, rank)
        dump = traced.dump if rank == 0 else None
        yield trace(
            own,
            describe(own, plan),
            plan,
            functional=functional,
            archs=traced.archs,
            dump=dump,
        )


def run_lower(lower: Callable[..., Lowered], traced: Traced, folder: Path) -> Lowered:
    """Lower a trace into `folder` with `lower`, and add notes and mixtures to the result.

    `lower`: a function of `bind_lower`. UnsupportedError: the ONNX exporter lacks an operator.
    """
    import torch.onnx

    from kvgraph.compiler import step_memory
    from kvgraph.compiler.mixtures import mixtures_of

    try:
        lowered = lower(traced, folder)
    except torch.onnx.OnnxExporterError as error:
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        raise UnsupportedError(
            f"architecture {traced.model.architecture!r}: expected operators that the onnx "
            f"exporter has, got one that it has not: {first_line(cause).rstrip('.')}; write "
            "it with other operators"
        ) from error
    lowered.notes += traced.weights.notes()
    lowered.notes += step_memory.notes_of(traced.program, traced.signature, traced.passes)
    lowered.mixtures = mixtures_of(traced)
    return lowered


def bind_lower(
    request: CompileRequest, weights: str | None, progress: Progress
) -> Callable[..., Any]:
    """The backend's `lower` function, with the options that it takes already bound."""
    support = request.support
    known = {
        "archs": request.target.archs,
        "bounds": request.bounds,
        "progress": progress,
        "weight_bits": WEIGHT_BITS.get(weights or ""),
    }
    return partial(imported(support.lower), **{name: known[name] for name in support.options})


def require_kernels(plan: CachePlan, request: CompileRequest) -> None:
    """Raise UnsupportedError if the backend's kernels do not support the cache."""
    require, target = request.support.require, request.target
    if not require:
        return
    if plan.strategy is not KVCacheStrategy.PAGED:
        raise UnsupportedError(
            f"cache: expected 'paged' for target {target.kind}, got '{plan.strategy}'"
        )
    imported(require)(plan, target.archs)
