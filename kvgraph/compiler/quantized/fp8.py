"""Read FP8 (E4M3) weights with scales of blocks (DeepSeek, Qwen3) or rows (FBGEMM), or one scale.

Weight `X` is multiplied by its scales, which are in `X_scale_inv` or `X_scale`. GPTQModel stores
their inverses and says so: `weight_scale_semantics` is "inverse". Some layers may have other blocks
than the rest; `dynamic` says so.
"""

from __future__ import annotations

from functools import partial

import torch

from kvgraph.compiler.frontends.folder import Config, block_of
from kvgraph.compiler.quantized.activations import SEMANTICS
from kvgraph.compiler.quantized.floats import FLOAT8, scaled
from kvgraph.compiler.quantized.parts import Parts, rule_for
from kvgraph.compiler.values import Values

SCALES = ("_scale_inv", "_scale")
METHOD, INVERSE = "weight_scale_method", "inverse"
FIELDS = ("activation_scale_ub", "scale_fmt", METHOD, SEMANTICS)
"""Known fields of scales: FBGEMM's, DeepSeek's and GPTQModel's. Any other may change what a scale
means."""


def weights(parts: Parts, config: Config) -> dict[str, Values]:
    _are_inverse(parts, config)
    names = {name for name, stored in parts.stored.items() if stored.dtype == FLOAT8}
    names |= {stem for end in SCALES for stem in parts.stems(end) if stem in parts.stored}

    def weight(name: str) -> Values:
        numbers = parts.take(name, name)
        parts.require_dtype(numbers, torch.float8_e4m3fn)
        given = [f"{name}{end}" for end in SCALES if f"{name}{end}" in parts.stored]
        scales = parts.take(given[0] if given else f"{name}{SCALES[0]}", name)
        own = {**config, **rule_for(config, name.removesuffix(".weight"))}
        block = block_of(own.get("weight_block_size"))
        return scaled(parts, numbers, scales, block, is_inverse=_are_inverse(parts, own))

    return {name: parts.read(name, partial(weight, name)) for name in sorted(names)}


def _are_inverse(parts: Parts, config: Config) -> bool:
    """Whether numbers are divided by their scales. UnsupportedError if the configuration does not
    say so clearly, or has a field of scales that is not known."""
    for name, value in config.items():
        if "scale" in name and name not in FIELDS and value is not None:
            raise parts.refuse(name, f"no fields of scales but {list(FIELDS)}", repr(value))
    said = config.get(SEMANTICS)
    if said != INVERSE and (said is not None or config.get(METHOD) is not None):
        raise parts.refuse(SEMANTICS, repr(INVERSE), repr(said))
    return said is not None
