"""Plan how a model and its cache fit into a device's memory; no weight is read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvgraph.compiler.alone import alone
from kvgraph.compiler.described import ModelSizes
from kvgraph.compiler.fitting import Fit, PlanRequest, RankedModel, fit, would_fit
from kvgraph.compiler.frontends import stored
from kvgraph.compiler.frontends.counts import require_counts
from kvgraph.compiler.frontends.folder import checkpoint_dtype, quantization, read_config
from kvgraph.compiler.frontends.found_instead import require_known_names
from kvgraph.compiler.frontends.gguf import as_folder
from kvgraph.compiler.frontends.lengths import required_length
from kvgraph.compiler.frontends.stored_forms import doubts_of
from kvgraph.compiler.options import resolve
from kvgraph.compiler.reserve import Reserve
from kvgraph.contract.dims import ceildiv
from kvgraph.contract.dtypes import WEIGHT_BITS
from kvgraph.contract.loading import require_package
from kvgraph.contract.manifest_values import MOST
from kvgraph.errors import ParamsError, UnsupportedError
from kvgraph.kv.memory import DEFAULT_BATCH_TOKENS

if TYPE_CHECKING:
    from kvgraph.compiler.checkpoint import Checkpoint
    from kvgraph.compiler.frontends import huggingface

ROWS = (1, 64)
"""Rows of the steps for which a plan says how many bytes of weights are read."""


@dataclass(frozen=True)
class DeploymentPlan:
    """The memory plan of one device; sizes are in bytes, and the graph itself is not counted.

    With several ranks each has a device, and all of them serve the same requests.
    """

    architecture: str
    target: str
    dtype: str
    """dtype of activations."""
    cache_dtype: str
    memory: int
    weights: int
    """Bytes of weights as the target's default backend stores them, with rotary tables."""
    weights_dtype: str
    """Kind of packed weights (fp32, bf16, int8, int4 or stored), else the activations' dtype."""
    reserve: Reserve
    """Memory for the largest step."""
    kept: int
    """Bytes that an engine on a GPU leaves to captured graphs and libraries; 0 on a CPU."""
    cache_memory: int
    page_size: int
    pages: dict[str, int]
    """Number of pages by leaf path; a single cache has the path ""."""
    bytes_per_page: dict[str, int]
    max_seq_len: int
    concurrent_requests: int
    """Number of requests of `max_seq_len` tokens that fit at once."""
    longest_context: int
    """Most tokens of a single request, at most `max_seq_len`."""
    parameters: int
    active_parameters: int
    """Number of parameters that compute one token: of experts, only the active ones."""
    read_by_step: dict[str, int]
    """Rows of a step -> bytes of weights that it reads; empty for a model without experts."""
    warnings: list[str]
    """Sentences on what compile refuses, on needless computation, and on uncertain sizes."""
    ranks: int = 1


def plan_deployment(
    folder: Path,
    *,
    target: str,
    memory: int,
    max_seq_len: int | None,
    max_batch_size: int,
    max_batch_tokens: int = DEFAULT_BATCH_TOKENS,
    dtype: str | None,
    weights: str | None = None,
    cache_dtype: str | None,
    page_size: int | None = None,
    tp: int = 1,
    progress: Callable[[str], None] = lambda stage: None,
) -> DeploymentPlan:
    """Plan one device of `memory` bytes for the checkpoint in `folder`.

    The cache is described on a virtual device; no weight is read and nothing is allocated. Weights
    are counted from the headers of the safetensors, or from their index. Without these, and for all
    but the best-known architectures, transformers builds the model with fake parameters. Quantised
    weights have the forms that compile gives their tensors (of numbers, zero points, orders of
    inputs and tied weights that are stored apart are read) or, without tensors, those that the
    configuration says.

    - `folder`: a checkpoint folder, or a GGUF file.
    - `dtype`, `weights`: as for `compile` with the target's default backend.
    - `tp`: number of devices that share the model, which transformers' plan cuts into ranks. If
      `compile` would refuse that, a warning says so, and sizes are those of equal parts.

    ModelError: the folder is damaged, or its weights have names that compile does not know.
    ParamsError: weights, the largest step and a page do not fit; the message says what would fit.
    UnsupportedError: no graph has such a target, cache or weights, as for `compile`.
    MissingDependencyError: transformers is needed and not installed.
    """
    request = resolve(
        target,
        None,
        dtype=dtype,
        weights=weights,
        cache_dtype=cache_dtype,
        page_size=page_size,
        tp=tp,
    )
    _require_steps(max_batch_size, max_batch_tokens)
    support = request.support
    with as_folder(folder) as opened:
        config = read_config(opened)
        require_known_names(opened)
        require_counts(opened, config)
        dtype = dtype or checkpoint_dtype(config)
        is_quantized = quantization(config) is not None
        weights = request.settled_weights(dtype, is_quantized=is_quantized)
        if request.float32:
            dtype = "float32"
        bits = WEIGHT_BITS.get(weights or "")
        describe = cache(_Describer(opened, config, dtype, bits is not None, progress))
        of = describe(tp)
        wanted = PlanRequest(
            target=target,
            memory=memory,
            dtype=dtype,
            weights=weights,
            cache_dtype=cache_dtype,
            page_size=request.page_size,
            max_seq_len=_length(of.model, max_seq_len),
            max_batch_size=max_batch_size,
            max_batch_tokens=max_batch_tokens,
        )
        try:
            found = fit(of, wanted)
        except ParamsError as error:
            packs = "weight_bits" in support.options
            hints = would_fit(of, wanted, packs=packs, ranks=support.ranks, describe=describe)
            named = ", ".join(hints)
            raise ParamsError(f"{error}; what fits: {named}" if named else str(error)) from error
    return _made(of, wanted, found)


def _require_steps(max_batch_size: int, max_batch_tokens: int) -> None:
    """Raise ParamsError unless rows and tokens of a step are at least 1."""
    given = {"max_batch_size": max_batch_size, "max_batch_tokens": max_batch_tokens}
    for name, value in given.items():
        if value < 1:
            raise ParamsError(f"{name}: expected >= 1, got {value}")


def _length(model: ModelSizes, given: int | None) -> int:
    length = required_length(model.max_seq_len) if given is None else given
    most = min(MOST, max(model.max_seq_len, model.most_seq_len))
    if not 1 <= length <= most:
        raise ParamsError(f"max_seq_len: expected 1 to {most} from the model, got {length}")
    return length


def _made(of: RankedModel, wanted: PlanRequest, found: Fit) -> DeploymentPlan:
    model, ranks, pages, leaves = of.model, of.ranks, found.pages, found.leaves
    unbounded = [path for path, leaf in leaves.items() if leaf.window_size is None]
    held = (pages.pages[path] * wanted.page_size for path in unbounded)
    read = [model.read_bytes(wanted.dtype, wanted.bits, wanted.on_cpu, rows) for rows in ROWS]
    return DeploymentPlan(
        architecture=model.architecture,
        target=wanted.target,
        dtype=wanted.dtype,
        cache_dtype=wanted.cache_dtype or wanted.dtype,
        memory=wanted.memory,
        weights=found.weights,
        weights_dtype=wanted.weights or wanted.dtype,
        reserve=found.reserve,
        kept=found.kept,
        cache_memory=pages.nbytes // ranks,
        page_size=wanted.page_size,
        pages=pages.pages,
        bytes_per_page={path: leaf.bytes_per_page // ranks for path, leaf in leaves.items()},
        max_seq_len=wanted.max_seq_len,
        concurrent_requests=pages.max_concurrent_requests,
        longest_context=min([wanted.max_seq_len, *held]),
        parameters=model.parameters,
        active_parameters=model.active_parameters,
        read_by_step={
            str(rows): ceildiv(nbytes, of.parts)
            for rows, nbytes in zip(ROWS, read, strict=True)
            if model.experts
        },
        warnings=list(_warnings(of)),
        ranks=ranks,
    )


def _warnings(of: RankedModel) -> Iterator[str]:
    if of.refusal:
        yield f"compile refuses this: {of.refusal}; sizes are those of {of.ranks} equal parts"
    yield from of.model.notes


@dataclass(frozen=True)
class _Describer:
    """A callable: `self(ranks)` describes the model as one of `ranks` holds it."""

    folder: Path
    config: Mapping[str, Any]
    dtype: str
    by_shape: bool
    progress: Callable[[str], None]

    def __call__(self, ranks: int) -> RankedModel:
        """Describe the model by the checkpoint's own files if possible, else by transformers."""
        if ranks == 1:
            try:
                whole = stored.describe(self.folder, self.config, by_shape=self.by_shape)
            except stored.InDoubtError as error:
                return RankedModel(self._ask(str(error), 1), 1)
            return RankedModel(whole.kept_as({}), 1)
        try:
            return RankedModel(
                self._ask("its model has the plan for tensor parallelism", ranks), ranks
            )
        except UnsupportedError as refusal:
            return RankedModel(self(1).model, ranks, str(refusal))

    def _ask(self, why: str, ranks: int) -> ModelSizes:
        with alone():
            return self._asked(why, ranks)

    def _asked(self, why: str, ranks: int) -> ModelSizes:
        need = f"needed to plan {self.folder}, since {why}"
        for name in ("torch", "transformers"):
            require_package(name, need, "pip install 'kvgraph[compile]'")
        self.progress(f"asking transformers, since {why}")
        from kvgraph.compiler.frontends import measured

        model, checkpoint, left = self._opened
        own = checkpoint or measured.said(model, self.config)
        found = measured.describe(model, self.dtype, ranks, own)
        doubts = doubts_of(self.config, has_experts=bool(found.experts))
        return replace(found, notes=(*found.notes, *left, *(() if checkpoint else doubts)))

    @cached_property
    def _opened(self) -> tuple[huggingface.Description, Checkpoint | None, tuple[str, ...]]:
        """The whole model, its parameters if their tensors are at hand, and notes on tensors that
        are left out."""
        from kvgraph.compiler.frontends import huggingface, measured
        from kvgraph.compiler.frontends.left_over import notes_of

        model = huggingface.describe(self.folder, self.dtype)
        located = measured.located(model, self.folder, self.config)
        measured.untie(model, located.apart)
        return model, located.checkpoint, notes_of(located.left)
