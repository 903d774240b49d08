"""Weights of linear layers -> the form that products on a GPU read (ops/matrices.py).

Decision: rounded to nearest, without calibration, as on a CPU (packed_weights.py). An int8 scale is
the column's largest magnitude over 127. Nibbles have no zero point: a group's scale has the sign
that makes its extreme -8, and is the one of TRIED of the least squared error. On Gaussian weights
that is 2 % worse than a zero point for each group (an error of 9.7 % against 9.6), and costs
neither memory nor a subtraction for each weight.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch

from kvgraph.ops.matrices import GROUP, HALF, depth_of, groups_of

BYTE_MAX, NIBBLE_MIN, NIBBLE_MAX = 127, -8, 7
TRIED = tuple(1 - i / 20 for i in range(9))
"""Shares of the scale that holds a group's extreme: clipping it may cost less."""

BLOCK_ELEMENTS = 1 << 22
"""Of float32 that are worked on at once."""

Form = tuple[tuple[int, ...], torch.dtype]
"""Shape and dtype."""


@dataclass(frozen=True)
class Matrix:
    """A weight, its scales `[groups, columns]` and its bias; None where it has none."""

    weight: torch.Tensor
    scales: torch.Tensor | None = None
    bias: torch.Tensor | None = None


OPERANDS = tuple(each.name for each in fields(Matrix))


def forms(
    columns: int, inputs: int, bits: int, dtype: torch.dtype, has_bias: bool
) -> dict[str, Form]:
    """Of each operand that a weight `[columns, inputs]` becomes. `bits` 0: it stays in `dtype`."""
    stored = torch.int8 if bits else dtype
    found: dict[str, Form] = {"weight": ((columns, depth_of(inputs, bits)), stored)}
    if bits:
        found["scales"] = (groups_of(inputs, bits), columns), torch.float32
    if has_bias:
        found["bias"] = (columns,), dtype
    return found


def in_turn(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Rows of each part in turn."""
    return torch.stack(list(parts), 1).reshape(-1, *parts[0].shape[1:])


def stored(rows: torch.Tensor, bits: int) -> Matrix:
    """`rows [N, K]` of a weight, without a bias."""
    if not bits:
        return Matrix(rows)
    step = max(1, BLOCK_ELEMENTS // rows.shape[1])
    blocks = [_block(rows[i : i + step].float(), bits) for i in range(0, len(rows), step)]
    weights, scales = zip(*blocks, strict=True)
    return Matrix(torch.cat(weights), torch.cat(scales).T.contiguous())


def _block(rows: torch.Tensor, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Stored rows, and scales `[N, groups]`."""
    if bits == 8:
        scale = rows.abs().amax(1, keepdim=True) / BYTE_MAX
        return torch.round(rows / _divisor(scale)).to(torch.int8), scale
    short = -rows.shape[1] % GROUP
    groups = torch.nn.functional.pad(rows, (0, short)).reshape(len(rows), -1, GROUP)
    scale = _least_error(groups)
    whole = _nibbles(groups, scale).to(torch.int8)
    both = (whole[..., :HALF] & 15) | (whole[..., HALF:] << 4)
    return both.reshape(len(rows), -1), scale[..., 0]


def _least_error(groups: torch.Tensor) -> torch.Tensor:
    """The scale of each group, `[N, groups, 1]`."""
    largest, smallest = groups.amax(-1, keepdim=True), groups.amin(-1, keepdim=True)
    extreme = torch.where(largest > -smallest, largest, smallest)
    kept, best = torch.zeros_like(extreme), torch.full_like(extreme, torch.inf)
    for share in TRIED:
        scale = extreme * (share / NIBBLE_MIN)
        error = (_nibbles(groups, scale) * scale - groups).square_().sum(-1, keepdim=True)
        better = error < best
        best, kept = torch.where(better, error, best), torch.where(better, scale, kept)
    return kept


def _nibbles(groups: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return (groups / _divisor(scale)).round_().clamp_(NIBBLE_MIN, NIBBLE_MAX)


def _divisor(scale: torch.Tensor) -> torch.Tensor:
    return torch.where(scale == 0, 1.0, scale)
