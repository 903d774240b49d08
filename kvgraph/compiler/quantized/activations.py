"""Whether a checkpoint in fewer bits was made for inputs of its layers that are rounded too.

Only how wide they are is read: each row is scaled as it comes, under one scale. A checkpoint's own
scales of activations, or those of groups of inputs, would say no more about a row.
"""

from __future__ import annotations

from collections.abc import Mapping

from kvgraph.compiler.frontends.folder import Config

FP8_METHODS = ("fp8", "fbgemm_fp8")
"""Whose readers round activations always."""
ALGORITHMS = ("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_REAL_QUANT")
"""Of modelopt; FP8_PB_WO is of weights alone."""
PRESETS = ("W8A8", "INT8", "FP8", "FP8_DYNAMIC", "FP8_BLOCK")
"""Named schemes of compressed-tensors whose weights and activations have 8 bits."""
BITS = 8


def bits(config: Config) -> int:
    """Of activations, where all layers of 8 bits have such, of the same kind; 0: they are not
    rounded."""
    if config.get("quant_method") in FP8_METHODS or config.get("quant_algo") in ALGORITHMS:
        return BITS
    groups = config.get("config_groups")
    if not isinstance(groups, Mapping):
        return 0
    of_eight = [group for group in groups.items() if _is_of_eight(*group)]
    return BITS if of_eight and all(_rounds(*group) for group in of_eight) else 0


def _is_of_eight(name: str, group: object) -> bool:
    if isinstance(group, list):  # a scheme by its name, and what it is of
        return name.upper().startswith(("W8", "FP8", "INT8"))
    return _kind(group, "weights")[0] == BITS


def _rounds(name: str, group: object) -> bool:
    if isinstance(group, list):
        return name.upper() in PRESETS
    return _kind(group, "weights") == _kind(group, "input_activations")


def _kind(group: object, of: str) -> tuple[object, object, bool]:
    """Bits, type, and whether numbers lie around zero, as ours do."""
    found = group.get(of) if isinstance(group, Mapping) else None
    given = found if isinstance(found, Mapping) else {}
    return given.get("num_bits"), given.get("type", "int"), given.get("symmetric") is not False
