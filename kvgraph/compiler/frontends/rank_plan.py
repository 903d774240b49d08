"""Which modules and parameters of a model are cut into ranks, and how: transformers' plan of it,
and what it leaves open.

Experts are cut by their inner dimension, as the plan for tensor parallelism says, where ranks
divide it. Else, and where that plan has no row for them, each rank has a share of the experts, as
the plan for expert parallelism says.

Attention of a known kind (`rank_parts`) is cut by its heads, whatever the plan says of it: some
have no row for it, some leave it whole. Where a plan has no row for layers at all, feed-forward
layers of a known kind are cut too; a model without both is refused.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import nn

from kvgraph.compiler.frontends.decoder import Decoder
from kvgraph.compiler.frontends.rank_parts import attention_rows, feed_forward_rows, whole_rows
from kvgraph.errors import UnsupportedError

Plan = Mapping[str, str]
"""Name of a module or a parameter, with "*" for its layer -> how it is cut."""

PARAMETERS = {
    "colwise": (-2, 1),
    "rowwise": (-1, 1),
    "packed_colwise": (-2, 2),
    "packed_rowwise": (-1, 2),
    "grouped_gemm": (0, 1),
}
"""Style of a parameter with a row of the plan of its own, such as experts: dim, packed parts."""

BY_EXPERT = "ep_dispatch_experts"
"""Style of a module of which each rank has a share of the experts."""


def pattern_of(name: str) -> str:
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)


def plan_of(decoder: Decoder, architecture: str, ranks: int) -> Plan:
    """UnsupportedError for a model without one, or with heads that `ranks` does not divide."""
    model: nn.Module = decoder.model
    text: Any = model.config.get_text_config()  # type: ignore[union-attr,operator]
    given: Plan = getattr(model, "tp_plan", None) or {}
    plan = dict(given) | dict(_experts(model, given, getattr(model, "ep_plan", None) or {}, ranks))
    attention = _rows(model, attention_rows)
    if not any("*" in name for name in plan):  # of its embedding at most
        layers = _rows(model, feed_forward_rows)
        if not (attention and layers):
            raise UnsupportedError(
                f"tp: expected a plan for tensor parallelism in transformers' model of "
                f"{architecture!r}, or layers whose parts are known, got neither"
            )
        plan |= layers
    if text.num_attention_heads % ranks:
        raise UnsupportedError(
            f"tp: expected ranks that divide the {text.num_attention_heads} attention heads of "
            f"{architecture!r}, got {ranks}"
        )
    return plan | attention | _rows(model, whole_rows)


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


def _rows(
    model: nn.Module, rows_of: Callable[[nn.Module], Mapping[str, str] | None]
) -> dict[str, str]:
    """What `rows_of` says of the modules of `model`; nothing where it does not know one of them."""
    plan: dict[str, str] = {}
    for name, module in model.named_modules():
        rows = rows_of(module)
        if rows is None:
            continue
        if not rows:
            return {}
        plan |= {f"{pattern_of(name)}.{part}": style for part, style in rows.items()}
    return plan
