"""Fit weights, reserve and pages into a device's memory; suggest flags when they do not fit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import islice

from kvgraph.compiler.cache import plan_cache, pool_types
from kvgraph.compiler.described import ModelSizes
from kvgraph.compiler.reserve import Reserve, reserve_of
from kvgraph.contract.devices import Target, virtual_devices
from kvgraph.contract.dims import ceildiv
from kvgraph.contract.dtypes import SMALL_WEIGHTS, WEIGHT_BITS
from kvgraph.contract.params import KVCacheParams
from kvgraph.contract.shards import MOST_SHARDS
from kvgraph.contract.sizes import size_text
from kvgraph.errors import MissingDependencyError, ParamsError
from kvgraph.kv.memory import DEVICE_CACHE_SHARE, LeafPlan, most_logits, plan_leaves

LEAST_TOKENS = 16
"""Fewest tokens of a step that a hint suggests."""


@dataclass(frozen=True)
class RankedModel:
    """A model as one of `ranks` devices holds it.

    `refusal`: why compile cannot cut the model into these ranks; empty if it can. With a refusal
    `model` is the whole model, and sizes are estimated as equal parts of it.
    """

    model: ModelSizes
    ranks: int
    refusal: str = ""

    @property
    def parts(self) -> int:
        """Number of equal parts that `model`'s sizes must still be divided by."""
        return self.ranks if self.refusal else 1


@dataclass(frozen=True)
class PlanRequest:
    """The compile and engine options to fit into `memory` bytes of one device."""

    target: str
    memory: int
    dtype: str
    weights: str | None
    cache_dtype: str | None
    page_size: int
    max_seq_len: int
    max_batch_size: int
    max_batch_tokens: int

    @property
    def on_cpu(self) -> bool:
        return Target.parse(self.target).kind == "cpu"

    @property
    def bits(self) -> int | None:
        return WEIGHT_BITS.get(self.weights or "")


@dataclass(frozen=True)
class Fit:
    """Bytes of one device's memory by use; `pages` counts the pages of the whole replica."""

    weights: int
    reserve: Reserve
    kept: int
    """Bytes that an engine on a GPU leaves to captured graphs and libraries; 0 on a CPU."""
    pages: LeafPlan
    leaves: dict[str, KVCacheParams]


def fit(of: RankedModel, wanted: PlanRequest) -> Fit:
    """Divide the memory among weights, reserve and pages. ParamsError if weights, a step and one
    page do not fit."""
    model, ranks = of.model, of.ranks
    weights = weight_bytes(of, wanted)
    reserve = reserve_of(
        model,
        wanted.dtype,
        tokens=wanted.max_batch_tokens,
        rows=most_logits(wanted.max_batch_size, wanted.max_batch_tokens),
        ranks=ranks,
        on_cpu=wanted.on_cpu,
    )
    rest = wanted.memory - weights - reserve.nbytes
    if rest <= 0:
        raise ParamsError(
            f"memory: expected more than {weights} bytes of weights and {reserve.nbytes} of "
            f"{reserve.text}, got {wanted.memory}"
        )
    available = rest if wanted.on_cpu else int(rest * DEVICE_CACHE_SHARE)
    dtype, quantization = pool_types(wanted.dtype, wanted.cache_dtype)
    params = plan_cache(
        [replace(n, n_kv_heads=ceildiv(n.n_kv_heads, of.parts) * of.parts) for n in model.layers],
        dtype=dtype,
        quantization=quantization,
        page_size=wanted.page_size,
        devices=virtual_devices(wanted.target, ranks),
    ).params
    pages = plan_leaves(
        params,
        available * ranks,
        wanted.max_batch_size,
        wanted.max_seq_len,
        wanted.max_batch_tokens,
    )
    return Fit(weights, reserve, rest - available, pages, params.leaves)


def weight_bytes(of: RankedModel, wanted: PlanRequest) -> int:
    """Bytes of weights of one device."""
    return ceildiv(of.model.weight_bytes(wanted.dtype, wanted.bits, wanted.on_cpu), of.parts)


def would_fit(
    of: RankedModel,
    wanted: PlanRequest,
    *,
    packs: bool,
    ranks: bool,
    describe: Callable[[int], RankedModel],
) -> Iterator[str]:
    """Flags with which the model fits, as text; some with the weights' size on a device.

    `packs`: int8 and int4 weights may be suggested. `ranks`: more ranks may be suggested.
    `describe`: returns the model as one of the given number of ranks holds it.
    """
    smaller = list(_smaller_weights(wanted)) if packs else []
    fitting = [choice for choice in smaller if _fits(of, choice)]
    for choice in fitting:
        yield f"--weights {choice.weights} ({size_text(weight_bytes(of, choice))})"
    yield from _smaller_steps(of, wanted)
    for choice in [wanted, *smaller] if ranks else []:
        least = None if choice in fitting else _least_ranks(choice, describe, of.ranks + 1)
        if least is not None:
            flag = "" if choice is wanted else f"--weights {choice.weights} "
            each = size_text(weight_bytes(least, choice))
            yield f"{flag}--tp {least.ranks} ({each} on each device)"


def _smaller_weights(wanted: PlanRequest) -> Iterator[PlanRequest]:
    for name in SMALL_WEIGHTS:
        if WEIGHT_BITS[name] < (wanted.bits or 32):
            yield replace(wanted, weights=name)


def _smaller_steps(of: RankedModel, wanted: PlanRequest) -> Iterator[str]:
    """A flag with fewer tokens, and a flag with fewer rows, with which it fits; sizes are halved
    until it does."""
    tokens = wanted.max_batch_tokens
    rows = min(wanted.max_batch_size, tokens)  # a step has no more rows than tokens
    shorter = (replace(wanted, max_batch_tokens=n) for n in _halves(tokens, LEAST_TOKENS))
    for choice in _first_fitting(of, shorter):
        yield f"--max-batch-tokens {choice.max_batch_tokens}"
    narrower = (replace(wanted, max_batch_size=n) for n in _halves(rows, 1))
    for choice in _first_fitting(of, narrower):
        yield f"--max-batch-size {choice.max_batch_size}"


def _first_fitting(of: RankedModel, choices: Iterator[PlanRequest]) -> Iterator[PlanRequest]:
    """The first choice that fits; empty if none does."""
    return islice((choice for choice in choices if _fits(of, choice)), 1)


def _halves(most: int, least: int) -> Iterator[int]:
    """`most` halved repeatedly, as long as the result is at least `least`."""
    while (most := most // 2) >= least:
        yield most


def _fits(of: RankedModel, wanted: PlanRequest) -> bool:
    try:
        fit(of, wanted)
    except ParamsError:
        return False
    return True


def _least_ranks(
    wanted: PlanRequest, describe: Callable[[int], RankedModel], first: int
) -> RankedModel | None:
    """The model with the fewest ranks, at least `first`, that compile takes and that fit; None: no
    number does. Without transformers equal parts are assumed."""
    whole = describe(1).model
    heads = {need.n_kv_heads for need in whole.layers}
    for ranks in range(first, MOST_SHARDS + 1):
        parts = RankedModel(whole, ranks, refusal="equal parts")
        if any(n % ranks and ranks % n for n in heads) or not _fits(parts, wanted):
            continue
        try:
            cut = describe(ranks)
        except MissingDependencyError:
            return parts
        if not cut.refusal and _fits(cut, wanted):
            return cut
    return None
