"""Trace a model to the program that every backend starts from: checked, with fused cache ops."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch._subclasses import FakeTensor

from kvgraph.compiler.cache import CachePlan
from kvgraph.compiler.export import (
    export,
    require_constants_unchanged,
    require_one_token,
    require_state_unchanged,
    stack_traces,
)
from kvgraph.compiler.functional import without_writes
from kvgraph.compiler.identity import program_digest
from kvgraph.compiler.model import Model
from kvgraph.compiler.passes import report_of
from kvgraph.compiler.passes.fuse_update_and_attend import attended_layers
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
    """Export a model, prove that only cache ops mix tokens, and fuse the cache ops.

    Afterwards each layer has one update_and_attend, which includes the rotary embedding if it fits,
    and only the caches are written in place.
    `functional`: the buffers are outputs too, after the logits. `archs`, `dump`: see `Traced`.
    UnsupportedError: the export or a check refuses the model. ModelError: a weight in memory is not
    finite; weights in a checkpoint are checked when they are read.
    """
    buffers = {name for name, _ in model.module.named_buffers()}
    for name, weight in model.module.state_dict().items():
        is_real = isinstance(weight, torch.Tensor) and not isinstance(weight, FakeTensor)
        if is_real and weight.is_floating_point():  # get_extra_state may be no tensor
            require_finite(name, weight, or_infinite=name in buffers)

    def exported(dump: Callable[[str, Traced], None] | None) -> Traced:
        program = export(model, signature, return_buffers=functional)
        digest = program_digest(program, signature)
        lean = without_writes(program)
        traced = Traced(model, signature, plan, lean, digest, archs=archs, dump=dump)
        traced.changed("export")
        return traced

    def proved(traced: Traced) -> Traced:
        require_constants_unchanged(traced.program)
        try:
            run_passes(traced, TRACE)
        except UnsupportedError as error:
            if left := report_of(traced.passes, "pair_complex").unmatched:
                raise UnsupportedError(f"{error}; of complex numbers: {left[0]}") from error
            raise
        is_padded = plan.strategy is KVCacheStrategy.PADDED
        if not is_padded:
            layers = attended_layers(traced.program, signature, plan)
            traced.plan = replace(plan, layers=layers)
        require_state_unchanged(traced.program, signature, is_padded=is_padded)
        if model.is_own:
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
    """Raise ModelError, which names the first, if a weight has a NaN or an infinity.

    `or_infinite`: infinities are allowed, as in a buffer with a mask or a bound.
    """
    wrong = weight.isnan() if or_infinite else ~weight.isfinite()
    if wrong.any():
        at = wrong.nonzero()[0].tolist()
        raise ModelError(f"{name}: expected finite weights, got {weight[tuple(at)]} at {at}")
