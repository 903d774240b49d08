"""Which modules and parameters of a model are cut into ranks, and how: transformers' plan of it,
and what it leaves open.

Experts are cut by their inner dimension, as the plan for tensor parallelism says, where ranks
divide it. Else, and where that plan has no row for them, each rank has a share of the experts, as
the plan for expert parallelism says.

A mixture whose plan cuts no attention (gpt_oss has one of its embedding alone) gets rows for it
where the attention is four projections, and sinks of a value for each head: nothing else of it
then depends on how many heads there are. Other attention is not guessed at.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from kvgraph.compiler.frontends.decoder import Decoder
from kvgraph.errors import UnsupportedError

Plan = Mapping[str, str]
"""Name of a module or a parameter, with "*" for its layer -> how it is cut."""

PARAMETERS = {
    "colwise": (-2, 1),
    "rowwise": (-1, 1),
    "packed_colwise": (-2, 2),
    "grouped_gemm": (0, 1),
}
"""Style of a parameter with a row of the plan of its own, such as experts: dim, packed parts."""

BY_EXPERT = "ep_dispatch_experts"
"""Style of a module of which each rank has a share of the experts."""

PROJECTIONS = {"q_proj": "colwise", "k_proj": "colwise", "v_proj": "colwise", "o_proj": "rowwise"}
SINKS = "sinks"


def pattern_of(name: str) -> str:
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)


def plan_of(decoder: Decoder, architecture: str, ranks: int) -> Plan:
    """UnsupportedError for a model without one, or with heads that `ranks` does not divide."""
    model: nn.Module = decoder.model
    text: Any = model.config.get_text_config()  # type: ignore[union-attr,operator]
    given: Plan = getattr(model, "tp_plan", None) or {}
    plan = dict(given) | dict(_experts(model, given, getattr(model, "ep_plan", None) or {}, ranks))
    if plan != given or any(".experts" in name for name in given):
        plan |= _attention(model, given)
    if not any("*" in name for name in plan):  # of its embedding at most
        raise UnsupportedError(
            f"tp: expected a plan for tensor parallelism in transformers' model of "
            f"{architecture!r}, got none"
        )
    if text.num_attention_heads % ranks:
        raise UnsupportedError(
            f"tp: expected ranks that divide the {text.num_attention_heads} attention heads of "
            f"{architecture!r}, got {ranks}"
        )
    return plan


def _experts(model: nn.Module, tp: Plan, ep: Plan, ranks: int) -> Iterator[tuple[str, str]]:
    """Rows of `ep` for experts that `tp` does not cut, or cuts where `ranks` do not divide."""
    modules = {pattern_of(name): module for name, module in model.named_modules()}
    for name, style in ep.items():
        module = modules.get(name)
        if style != BY_EXPERT or module is None or _divides(module, name, tp, ranks):
            continue
        if name in tp and not _divides(module, name, ep, ranks):
            continue
        yield from ((row, own) for row, own in ep.items() if row.startswith(name))


def _divides(module: nn.Module, name: str, plan: Plan, ranks: int) -> bool:
    """Whether `plan` cuts the parameters of `module`, into equal parts."""
    cuts = [
        (parameter.shape, *PARAMETERS[plan[f"{name}.{own}"]])
        for own, parameter in module.named_parameters(recurse=False)
        if plan.get(f"{name}.{own}") in PARAMETERS
    ]
    return bool(cuts) and all(shape[dim] % (ranks * parts) == 0 for shape, dim, parts in cuts)


def _attention(model: nn.Module, plan: Plan) -> Plan:
    """Rows of attention that `plan` cuts nowhere; none where one layer's has other parts."""
    rows: dict[str, str] = {}
    for name, module in model.named_modules():
        if not (hasattr(module, "layer_idx") and hasattr(module, "q_proj")):
            continue
        pattern = pattern_of(name)
        children = {child for child, part in module.named_children() if [*part.parameters()]}
        own = set(module._parameters)
        if children != set(PROJECTIONS) or own - {SINKS}:
            return {}
        if any(row.startswith(f"{pattern}.") for row in plan):
            return {}
        rows |= {f"{pattern}.{child}": style for child, style in PROJECTIONS.items()}
        rows |= {f"{pattern}.{parameter}": "colwise" for parameter in own}
    return rows
