"""Find whether a quantised checkpoint was made for rounded activations.

Only their number of bits is read. Each row gets one scale at run time, so a checkpoint's own scales
of activations, or scales of groups of inputs, are not needed.
"""

from __future__ import annotations

from collections.abc import Mapping

from kvgraph.compiler.frontends.folder import Config

SEMANTICS = "weight_scale_semantics"
"""A field in which GPTQModel says what scales of method fp8 mean."""
FP8_METHODS = ("fp8", "fbgemm_fp8")
"""Quantisation methods for which activations are always rounded, but for GPTQModel's fp8."""
ALGORITHMS = ("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_REAL", "MXFP8")
"""modelopt's `quant_algo`, in capitals, with rounded activations. FP8_PB_WO is for weights only."""
PRESETS = ("W8A8", "INT8", "FP8", "FP8_DYNAMIC", "FP8_BLOCK")
"""compressed-tensors' named schemes with weights and activations in 8 bits."""
BITS = 8


def bits(config: Config) -> int:
    """Bits of rounded activations (8), or 0 if they are not rounded.

    With groups, all layers with 8-bit weights must have activations of the weights' kind.
    """
    is_fp8 = config.get("quant_method") in FP8_METHODS and config.get(SEMANTICS) is None
    if is_fp8 or _algorithm(config) in ALGORITHMS:
        return BITS
    groups = config.get("config_groups")
    if not isinstance(groups, Mapping):
        return 0
    of_eight = [group for group in groups.items() if _is_of_eight(*group)]
    return BITS if of_eight and all(_rounds(*group) for group in of_eight) else 0


def _algorithm(config: Config) -> str:
    return str(config.get("quant_algo")).upper()


def _is_of_eight(name: str, group: object) -> bool:
    if isinstance(group, list):  # the name of a scheme, and the modules that it applies to
        return name.upper().startswith(("W8", "FP8", "INT8"))
    return _kind(group, "weights")[0] == BITS


def _rounds(name: str, group: object) -> bool:
    if isinstance(group, list):
        return name.upper() in PRESETS
    return _kind(group, "weights") == _kind(group, "input_activations")


def _kind(group: object, of: str) -> tuple[object, object, bool]:
    """Bits, type, and whether numbers are symmetric around zero, as those of kernels are."""
    found = group.get(of) if isinstance(group, Mapping) else None
    given = found if isinstance(found, Mapping) else {}
    return given.get("num_bits"), given.get("type", "int"), given.get("symmetric") is not False
