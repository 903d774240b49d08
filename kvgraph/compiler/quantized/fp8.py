"""Read FP8 (E4M3) weights with scales of blocks (DeepSeek, Qwen3) or rows (FBGEMM), or one scale.

Weight `X` is multiplied by its scales, which are in `X_scale_inv` or `X_scale`. GPTQModel stores
their inverses and says so: `weight_scale_semantics` is "inverse".
"""

from __future__ import annotations

import torch

from kvgraph.compiler.frontends.folder import DEFAULT_BLOCK, SEMANTICS, Config, block_of
from kvgraph.compiler.quantized.floats import FLOAT8, scaled
from kvgraph.compiler.quantized.parts import Parts
from kvgraph.compiler.values import Values

SCALES = ("_scale_inv", "_scale")
INVERSE = "inverse"


def weights(parts: Parts, config: Config) -> dict[str, Values]:
    block = block_of(config.get("weight_block_size", DEFAULT_BLOCK))
    semantics = config.get(SEMANTICS)
    if semantics not in (None, INVERSE):
        raise parts.refuse(SEMANTICS, f"none or {INVERSE!r}", repr(semantics))
    found: dict[str, Values] = {}
    names = {name for name, stored in parts.stored.items() if stored.dtype == FLOAT8}
    names |= {stem for end in SCALES for stem in parts.stems(end) if stem in parts.stored}
    for name in sorted(names):
        numbers = parts.take(name, name)
        parts.require_dtype(numbers, torch.float8_e4m3fn)
        given = [f"{name}{end}" for end in SCALES if f"{name}{end}" in parts.stored]
        scales = parts.take(given[0] if given else f"{name}{SCALES[0]}", name)
        found[name] = scaled(parts, numbers, scales, block, is_inverse=semantics == INVERSE)
    return found
