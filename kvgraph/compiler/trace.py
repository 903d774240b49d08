"""What every backend starts from: a model's program, proved and with its cache ops fused."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch._subclasses import FakeTensor

from kvgraph.compiler.cache import CachePlan
from kvgraph.compiler.export import (
    export,
    require_one_token,
    require_state_unchanged,
    stack_traces,
)
from kvgraph.compiler.frontends.decoder import Decoder
from kvgraph.compiler.functional import without_writes
from kvgraph.compiler.identity import program_digest
from kvgraph.compiler.model import Model
from kvgraph.compiler.passes.lists import TRACE, run_passes
from kvgraph.compiler.traced import Traced
from kvgraph.contract.params import KVCacheStrategy
from kvgraph.contract.signature import GraphSignature
from kvgraph.errors import ModelError, UnsupportedError


def trace(
    model: Model,
    signature: GraphSignature,
    plan: CachePlan,
    *,
    functional: bool,
    archs: Sequence[str] = (),
    dump: Callable[[str, Traced], None] | None = None,
) -> Traced:
    """Export, prove that tokens meet in the cache ops alone, and fuse these.

    Afterwards each layer has one update_and_attend, with the rotary embedding in it where it fits,
    and nothing but the caches is written in place.
    `functional`: the buffers are outputs too, behind the logits. `archs`, `dump`: as of `Traced`.
    UnsupportedError as the export and the passes raise it; ModelError for a weight in memory that
    is not finite (one that is streamed is checked on its way).
    """
    buffers = {name for name, _ in model.module.named_buffers()}
    for name, weight in model.module.state_dict().items():
        is_real = isinstance(weight, torch.Tensor) and not isinstance(weight, FakeTensor)
        if is_real and weight.is_floating_point():  # others: get_extra_state of a module
            require_finite(name, weight, or_infinite=name in buffers)

    def exported(dump: Callable[[str, Traced], None] | None) -> Traced:
        program = export(model, signature, return_buffers=functional)
        digest = program_digest(program, signature)
        lean = without_writes(program)
        traced = Traced(model, signature, plan, lean, digest, archs=archs, dump=dump)
        traced.changed("export")
        return traced

    def proved(traced: Traced) -> Traced:
        run_passes(traced, TRACE)
        is_padded = plan.strategy is KVCacheStrategy.PADDED
        require_state_unchanged(traced.program, signature, is_padded=is_padded)
        if not isinstance(model.module, Decoder):
            require_one_token(model, traced.program, signature)
        return traced

    with stack_traces(False):
        traced = exported(dump)
        try:
            return proved(traced)
        except UnsupportedError:
            pass  # traced again, with stack traces, to name the line of the model
    with stack_traces(True):
        return proved(exported(None))


def require_finite(name: str, weight: torch.Tensor, *, or_infinite: bool) -> None:
    """ModelError for a weight with a NaN or an infinity, which names the first. A buffer may hold
    infinities: a mask, or a bound."""
    wrong = weight.isnan() if or_infinite else ~weight.isfinite()
    if wrong.any():
        at = wrong.nonzero()[0].tolist()
        raise ModelError(f"{name}: expected finite weights, got {weight[tuple(at)]} at {at}")
