"""Read MXFP4 experts as in gpt-oss: FP4 numbers in groups of 32 inputs, scales are powers of two.

    X_blocks  uint8 [experts, N, K / 32, 16]   two numbers in a byte, the lower bits first
    X_scales  uint8 [experts, N, K / 32]       exponents with a bias of 127

The model's parameter X is `[experts, K, N]`. (OCP Microscaling Formats, version 1.0.)
"""

from __future__ import annotations

from functools import partial

import torch

from kvgraph.compiler.frontends.folder import Config
from kvgraph.compiler.quantized.floats import FourBits
from kvgraph.compiler.quantized.parts import Parts
from kvgraph.compiler.values import Values

BLOCK_BYTES = 16


def weights(parts: Parts, config: Config) -> dict[str, Values]:
    return {
        stem: parts.read(stem, partial(_weight, parts, stem)) for stem in parts.stems("_blocks")
    }


def _weight(parts: Parts, stem: str) -> Values:
    numbers = parts.take(f"{stem}_blocks", stem)
    scales = parts.take(f"{stem}_scales", numbers.stored.name)
    for part in (numbers, scales):
        parts.require_dtype(part, torch.uint8)
    parts.require_matrices(scales)
    parts.require_shape(numbers, (*scales.shape, BLOCK_BYTES))
    parts.kinds.add("4 bits in groups of 32")
    return FourBits(numbers, scales, transposed=True)
