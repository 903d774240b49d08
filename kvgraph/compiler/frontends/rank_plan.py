"""Decide which modules and parameters are cut into ranks, and how: transformers' plan, completed.

Experts are cut by their inner dimension, as the plan for tensor parallelism says, if ranks divide
it. Otherwise, or if that plan has no row for them, each rank has a share of the experts, as the
plan for expert parallelism says.

Attention of a known kind (`rank_parts`) is cut by its heads, whatever the plan says: some plans
have no row for it, some leave it whole. Feed-forward layers of a known kind are cut if the plan has
no row for them, such as shared experts. A model without a plan needs both to be of a known kind.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from torch import nn

from kvgraph.compiler.frontends.decoder import Decoder
from kvgraph.compiler.frontends.rank_parts import (
    FEED_FORWARD,
    attention_rows,
    feed_forward_rows,
    whole_rows,
)
from kvgraph.errors import UnsupportedError

Plan = Mapping[str, str]
"""Name of a module or parameter, with "*" for each number -> style, which says how it is cut."""

ONE_PART = (1,)
TWO_PARTS = (1, 1)

PARAMETERS = {
    "colwise": (-2, ONE_PART),
    "rowwise": (-1, ONE_PART),
    "packed_colwise": (-2, TWO_PARTS),
    "packed_rowwise": (-1, TWO_PARTS),
    "grouped_gemm": (0, ONE_PART),
}
"""Style of a parameter that has its own row in the plan, such as experts -> dim, packed parts."""

GATHERED = ("colwise_gather_output", "rowwise_split_input")
"""Styles of projections that gather between them: each rank has all inner values there."""

BY_EXPERT = "ep_dispatch_experts"
"""Style of a layer of experts that is cut by expert: each rank has a share of them."""


def pattern_of(name: str) -> str:
    return re.sub(r"\.\d+(?=\.|$)", ".*", name)


def plan_of(decoder: Decoder, architecture: str, ranks: int) -> Plan:
    """The plan that cuts a decoder into `ranks`.

    UnsupportedError: there is none for the model, or `ranks` do not divide its attention heads.
    """
    model: nn.Module = decoder.model
    text: Any = model.config.get_text_config()  # type: ignore[union-attr,operator]
    given: Plan = getattr(model, "tp_plan", None) or {}
    plan = dict(given) | dict(_experts(model, given, getattr(model, "ep_plan", None) or {}, ranks))
    attention = _rows(model, attention_rows)
    layers = {
        row: style
        for row, style in _rows(model, partial(feed_forward_rows, ranks=ranks)).items()
        if not _is_named(row.rpartition(".")[0], plan)
    }
    if not any("*" in name for name in plan) and not (attention and layers):
        raise UnsupportedError(
            f"tp: expected a plan for tensor parallelism in transformers' model of "
            f"{architecture!r}, or layers whose parts are known, got neither"
        )
    if text.num_attention_heads % ranks:
        raise UnsupportedError(
            f"tp: expected ranks that divide the {text.num_attention_heads} attention heads of "
            f"{architecture!r}, got {ranks}"
        )
    return plan | layers | attention | _rows(model, whole_rows)


def _experts(model: nn.Module, tp: Plan, ep: Plan, ranks: int) -> Iterator[tuple[str, str]]:
    """Rows of `ep` for experts that `tp` does not cut into `ranks` equal parts."""
    modules = {pattern_of(name): module for name, module in model.named_modules()}
    for name, style in ep.items():
        module = modules.get(name)
        if style != BY_EXPERT or module is None or _divides(module, name, tp, ranks):
            continue
        if name in tp and not _divides(module, name, ep, ranks):
            continue
        yield from ((row, own) for row, own in ep.items() if row.startswith(name))


def _divides(module: nn.Module, name: str, plan: Plan, ranks: int) -> bool:
    """Whether `plan` cuts parameters of `module`, and all that it cuts into `ranks` equal parts."""
    cuts = [
        (parameter.shape, *PARAMETERS[plan[f"{name}.{own}"]])
        for own, parameter in module.named_parameters(recurse=False)
        if plan.get(f"{name}.{own}") in PARAMETERS
    ]
    return bool(cuts) and all(shape[dim] % (ranks * len(parts)) == 0 for shape, dim, parts in cuts)


def _rows(
    model: nn.Module, rows_of: Callable[[nn.Module], Mapping[str, str] | None]
) -> dict[str, str]:
    """Rows by pattern that `rows_of` returns for modules of `model`.

    A pattern is left out if its modules are not known, or differ, in some layer.
    """
    found: dict[str, dict[str, str]] = {}
    unknown = set()
    for name, module in model.named_modules():
        rows, pattern = rows_of(module), pattern_of(name)
        if rows is None:
            continue
        known = found.setdefault(pattern, {})
        if not rows or any(known.get(part, style) != style for part, style in rows.items()):
            unknown.add(pattern)
        known.update(rows)
    return {
        f"{pattern}.{part}": style
        for pattern, rows in found.items()
        for part, style in rows.items()
        if pattern not in unknown
    }


def _is_named(pattern: str, plan: Plan) -> bool:
    """Whether `plan` has a row for feed-forward layers of `pattern`, or for a module around them.

    Rows that gather between the two projections do not count.
    """
    parts = {f"{pattern}.{part}" for part in FEED_FORWARD}
    return any(
        (row in parts and style not in GATHERED) or f"{pattern}.".startswith(f"{row}.")
        for row, style in plan.items()
    )
