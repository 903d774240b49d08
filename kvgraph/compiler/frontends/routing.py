"""Read how many experts a configuration has, and how many of them a token uses."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from pathlib import Path

from kvgraph.compiler.checkpoint_files import CONFIG
from kvgraph.errors import ModelError

EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
"""Configuration fields for the number of experts of a layer."""
ACTIVE = ("num_experts_per_tok", "num_experts_per_token", "top_k_experts", "moe_topk", "moe_k")
"""Configuration fields for the number of experts that a token uses."""
GROUPS, ACTIVE_GROUPS = "n_group", "topk_group"
UNGROUPED = "greedy"
"""Value of `topk_method` for which DeepSeek V2 has no groups of experts."""


def active_experts(config: object) -> int | None:
    """Number of experts that a token uses, by the family's name for it; None if it has none.

    For a list with a number for each layer, the largest.
    """
    return next((found for name in ACTIVE if (found := _number(config, name)) is not None), None)


def require_routing(folder: Path, config: object) -> None:
    """Raise ModelError if a token cannot use the experts that `config` says.

    Fields count if transformers' class of the configuration has them. A model without experts may
    have any.
    """
    own = {each.name for each in fields(config)} if is_dataclass(config) else set()
    names = [name for name in (*EXPERTS, *ACTIVE, GROUPS, ACTIVE_GROUPS) if name in own]
    numbers = {name: found for name in names if (found := _number(config, name)) is not None}
    counts = {name: numbers[name] for name in EXPERTS if numbers.get(name)}
    if not counts:
        return
    of = max(counts, key=lambda name: counts[name])
    most = counts[of]

    def require(name: str, is_fit: bool, expected: str) -> None:
        if not is_fit:
            got = numbers[name]
            raise ModelError(f"{folder}/{CONFIG}: {name}: expected {expected}, got {got}")

    for name in ACTIVE:
        active = numbers.get(name, 1)
        require(name, 1 <= active <= most, f"1 to {most} experts, as {of} says")
    groups = numbers.get(GROUPS)
    if groups is None or getattr(config, "topk_method", None) == UNGROUPED:
        return
    is_divisor = groups > 0 and most % groups == 0
    require(GROUPS, is_divisor, f"a divisor of {most}, the number of experts in {of}")
    chosen = numbers.get(ACTIVE_GROUPS, 1)
    require(ACTIVE_GROUPS, 1 <= chosen <= groups, f"1 to {groups} groups, as {GROUPS} says")


def _number(config: object, name: str) -> int | None:
    """A field's number, or the largest of its list; None if it is neither."""
    try:
        given = getattr(config, name, None)
    except RuntimeError:  # transformers': it differs between layers
        return None
    each = given if isinstance(given, list) else [given]
    return max(each) if each and all(isinstance(found, int) for found in each) else None
