"""Weights of linear layers -> the form that products on a GPU read (ops/matrices.py).

Decision: rounded to nearest, without calibration, as on a CPU (packed_weights.py). An int8 scale is
the column's largest magnitude over 127. Nibbles have no zero point: a group's scale has the sign
that makes its extreme -8, and is the one of TRIED of the least squared error. On Gaussian weights
that is 2 % worse than a zero point for each group (an error of 9.8 % against 9.6), and costs
neither memory nor a subtraction for each weight.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from kvgraph.compiler.packed_weights import Section, threads
from kvgraph.contract.dims import Array
from kvgraph.ops.matrices import GROUP, HALF, depth_of, groups_of

BYTE_MAX, NIBBLE_MIN, NIBBLE_MAX = 127, -8, 7
TRIED = (1.0, 0.925, 0.85, 0.775, 0.7)
"""Shares of the scale that holds a group's extreme: clipping it may cost less."""

SMALLEST = 1e-37
"""A scale whose inverse is a number."""

BLOCK_ELEMENTS = 1 << 17
"""Of float32 that a thread works on at once: half a MiB."""

ROWS_AT_ONCE = 1024
"""Of a weight that are read at once."""

Form = tuple[tuple[int, ...], torch.dtype]
"""Shape and dtype."""

Part = dict[str, torch.Tensor]
"""Operand -> rows of it that follow those of the parts before."""

OPERANDS = ("weight", "scales", "bias")
"""A weight `[columns, depth]`, its scales `[groups, columns]` and its bias."""


def forms(
    columns: int, inputs: int, bits: int, dtype: torch.dtype, has_bias: bool
) -> dict[str, Form]:
    """Of each operand that a weight `[columns, inputs]` becomes. `bits` 0: it stays in `dtype`."""
    kind = torch.int8 if bits else dtype
    found: dict[str, Form] = {"weight": ((columns, depth_of(inputs, bits)), kind)}
    if bits:
        found["scales"] = (groups_of(inputs, bits), columns), torch.float32
    if has_bias:
        found["bias"] = (columns,), dtype
    return found


def rows_in_turn(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """Rows of each part in turn."""
    return torch.stack(list(parts), 1).reshape(-1, *parts[0].shape[1:])


def stored(rows: torch.Tensor, bits: int) -> Part:
    """Weight and scales of `rows [N, K]`: a few rows at a time on each thread, so that what a step
    of it works on stays in the cache."""
    if not bits:
        return {"weight": rows}
    wide = rows.float().numpy()
    step = max(1, BLOCK_ELEMENTS // wide.shape[1])
    blocks = [wide[start : start + step] for start in range(0, len(wide), step)]
    weights, scales = zip(*threads().map(_bytes if bits == 8 else _nibbles, blocks), strict=True)
    return {
        "weight": torch.from_numpy(np.concatenate(weights)),
        "scales": torch.from_numpy(np.ascontiguousarray(np.concatenate(scales).T)),
    }


def stored_in_parts(
    sections: Sequence[Section], bits: int, dtype: torch.dtype, *, in_turn: bool
) -> Iterator[Part]:
    """Sections one after the other or, of two, row by row in turn: weights some rows at a time,
    then scales, then biases in `dtype`, where one has some."""
    scales = []
    for together in [sections] if in_turn else [[each] for each in sections]:
        features, step = together[0].features, ROWS_AT_ONCE
        for start in range(0, features, step):
            stop = min(start + step, features)
            rows = [torch.from_numpy(each.rows(start, stop)) for each in together]
            part = stored(rows_in_turn(rows), bits)
            scales.append(part.pop("scales"))
            yield part
    yield {"scales": torch.cat(scales, 1)}
    if any(each.bias is not None for each in sections):
        biases = [_bias(each) for each in sections]
        both = rows_in_turn(biases) if in_turn else torch.cat(biases)
        yield {"bias": both.to(dtype)}


def _bias(section: Section) -> torch.Tensor:
    if section.bias is None:
        return torch.zeros(section.features)
    return torch.from_numpy(section.bias)


def _bytes(rows: Array) -> tuple[Array, Array]:
    """int8 rows, and scales `[N, 1]`."""
    scale = np.abs(rows).max(-1, keepdims=True) / np.float32(BYTE_MAX)
    return np.rint(rows * _inverse(scale)).astype(np.int8), scale


def _nibbles(rows: Array) -> tuple[Array, Array]:
    """Two inputs in a byte, and scales `[N, groups]`."""
    if rows.shape[1] % GROUP:
        rows = np.pad(rows, ((0, 0), (0, -rows.shape[1] % GROUP)))
    groups = rows.reshape(len(rows), -1, GROUP)
    off = np.empty_like(groups)
    scale = _least_error(groups, off)
    whole = _whole(groups, scale, off).astype(np.int8)
    both = (whole[..., :HALF] & 15) | (whole[..., HALF:] << 4)
    return both.reshape(len(rows), -1), scale


def _least_error(groups: Array, off: Array) -> Array:
    """The scale of each group, `[N, groups]`; `off` is memory of the groups' size."""
    largest, smallest = groups.max(-1), groups.min(-1)
    extreme = np.where(largest > -smallest, largest, smallest)
    best = np.full(extreme.shape, np.inf, np.float32)
    kept: Array = np.zeros_like(extreme)
    for share in TRIED:
        scale = extreme * np.float32(share / NIBBLE_MIN)
        _whole(groups, scale, off)
        off *= scale[..., None]
        off -= groups
        error = np.einsum("ngk,ngk->ng", off, off)
        better = error < best
        best[better], kept[better] = error[better], scale[better]
    return kept


def _whole(groups: Array, scale: Array, out: Array) -> Array:
    np.multiply(groups, _inverse(scale)[..., None], out=out)
    np.rint(out, out=out)
    np.clip(out, NIBBLE_MIN, NIBBLE_MAX, out=out)
    return out


def _inverse(scale: Array) -> Array:
    """0 of what has none."""
    zeros = np.zeros_like(scale)
    np.divide(np.float32(1), scale, out=zeros, where=np.abs(scale) > SMALLEST)
    return zeros
