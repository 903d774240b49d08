"""Read NVIDIA Model Optimizer's checkpoints; a weight's form is found from its tensors.

For a weight of N outputs and K inputs:

    NVFP4   weight uint8 [N, K / 2], two numbers in a byte, the lower bits first; weight_scale
            float8_e4m3fn [N, K / 16], times weight_scale_2, a single number
    MXFP4   weight as above; weight_scale uint8 [N, K / 32], exponents
    FP8     weight float8_e4m3fn [N, K]; weight_scale: one, of rows [N], or of blocks of 128 x 128,
            [ceil(N / 128), 1, ceil(K / 128), 1]. Stacked experts X, stored as the model has them,
            have one, X_weight_scale
    MXFP8   weight float8_e4m3fn [N, K]; weight_scale uint8 [N, K / 32], exponents

Scales of activations and of a cache are ignored, as in compressed_tensors.py.
"""

from __future__ import annotations

from functools import partial

import torch

from kvgraph.compiler.frontends.folder import Config
from kvgraph.compiler.quantized.floats import FLOAT8, FourBits, scaled
from kvgraph.compiler.quantized.parts import Parts
from kvgraph.compiler.values import Values
from kvgraph.ops.packed import MXFP4_GROUP, NVFP4_GROUP

BLOCK = (128, 128)
UNREAD = ("NVFP4_AWQ", "W4A8_NVFP4_FP8")
"""Algorithms that are refused by name: one scales activations, one has groups of 32."""
SCALE, STACKED = ".weight_scale", "_weight_scale"
REFUSED = {
    ".pre_quant_scale": "scales that activations are multiplied by",
    ".svdquant_lora_a": "a part of low rank",
    ".svdquant_lora_b": "a part of low rank",
}
"""End of a name of a tensor that is not supported (of AWQ or SVDQuant) -> what it is."""


def weights(parts: Parts, config: Config) -> dict[str, Values]:
    algorithm = str(config.get("quant_algo"))
    if algorithm.upper() in UNREAD:
        raise parts.refuse("quant_algo", "NVFP4, MXFP4, FP8 or MXFP8", repr(algorithm))
    makers = {f"{stem}.weight": partial(_weight, parts, stem) for stem in parts.stems(SCALE)}
    makers |= {name: partial(_stacked, parts, name) for name in parts.stems(STACKED)}
    for end, what in REFUSED.items():
        for stem in parts.stems(end):
            makers[f"{stem}.weight"] = partial(_refused, parts, f"{stem}{end}", what)
    return {name: parts.read(name, make) for name, make in makers.items()}


def _refused(parts: Parts, name: str, what: str) -> Values:
    raise parts.refuse(name, "none", what)


def _stacked(parts: Parts, name: str) -> Values:
    """A parameter that is no module's `weight`: all experts of a layer."""
    scales = parts.take(f"{name}{STACKED}", name)
    numbers = parts.take(name, scales.stored.name)
    if numbers.stored.dtype != FLOAT8 or scales.shape not in ((), (1,)):
        got = f"{numbers.stored.dtype} with scales {scales.stored.dtype} {list(scales.shape)}"
        raise parts.refuse(name, "FP8 with one scale for stacked experts", got)
    return scaled(parts, numbers, scales, None)


def _weight(parts: Parts, stem: str) -> Values:
    scales = parts.take(f"{stem}.weight_scale", stem)
    numbers = parts.take(f"{stem}.weight", scales.stored.name)
    if numbers.stored.dtype == FLOAT8:
        return scaled(parts, numbers, scales, BLOCK, (MXFP4_GROUP,))
    is_nvfp4 = scales.stored.dtype == FLOAT8
    if numbers.dtype != torch.uint8 or not (is_nvfp4 or scales.dtype == torch.uint8):
        got = f"{numbers.stored.dtype} with scales in {scales.stored.dtype}"
        raise parts.refuse(f"{stem}.weight", "NVFP4, MXFP4, FP8 or MXFP8", got)
    group = NVFP4_GROUP if is_nvfp4 else MXFP4_GROUP
    parts.require_matrices(numbers)
    inputs = numbers.shape[-1] * 2
    parts.require_shape(scales, (*numbers.shape[:-1], -(-inputs // group)))
    parts.require_even_groups(scales, inputs, scales.shape[-1], (group,))
    parts.kinds.add(f"4 bits in groups of {group}")
    if not is_nvfp4:
        return FourBits(numbers, scales)
    whole = parts.take(f"{stem}.weight_scale_2", scales.stored.name)
    parts.require_shape(whole, (), (1,))
    return FourBits(numbers, scales, whole, is_factor=True)
