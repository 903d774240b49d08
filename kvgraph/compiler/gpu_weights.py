"""Convert weights of linear layers to the form that GPU matrix kernels read (ops/matrices.py).

Decision: weights that a checkpoint stores in a form that kernels support keep their numbers. All
others are rounded to nearest, without calibration, as on a CPU (packed_weights.py). An int8 scale
is the column's largest magnitude divided by 127. int4 has no zero point: a group's scale has the
sign that makes its extreme -8, times the factor of TRIED with the least squared error. On Gaussian
weights that is 2 % worse than a zero point for each group (an error of 9.8 % against 9.6), and
costs neither memory nor a subtraction for each weight.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import numpy as np
import torch

from kvgraph.compiler.packed_weights import BLOCK_ELEMENTS, Section, StoredRows
from kvgraph.compiler.threads import in_order
from kvgraph.contract.dims import Array
from kvgraph.ops.matrices import GROUP, depth_of, groups_of, span_of, stored_dtype
from kvgraph.ops.native import round_groups
from kvgraph.ops.packed import E2M1, E4M3, Form

BYTE_MAX, NIBBLE_MIN, NIBBLE_MAX = 127, -8, 7
TRIED = (1.0, 0.925, 0.85, 0.775, 0.7)
"""Factors tried for a group's scale. Below 1 the group's extreme is clipped, which may lower the
error."""

SMALLEST = 1e-37
"""Magnitude above which a scale has a finite inverse."""

ROWS_AT_ONCE = 256
"""Rows of a weight that are read at once."""

Shaped = tuple[tuple[int, ...], torch.dtype]

Part = dict[str, torch.Tensor]
"""Name of an operand -> the next piece of it, to be joined with the pieces of earlier parts."""

OPERANDS = ("weight", "scales", "group_bytes", "bias")
"""Operands of a weight: the weight `[columns, depth]`, scales and group bytes `[groups, columns]`,
and the bias `[columns]`."""


def shapes(
    columns: int, inputs: int, form: Form, dtype: torch.dtype, has_bias: bool
) -> dict[str, Shaped]:
    """Shape and dtype of each operand of a weight `[columns, inputs]`, by name.

    `form`: a form that kernels support; with `bits` 0 the weight stays in `dtype`.
    """
    bits, group = form.bits, form.group
    kind = getattr(torch, stored_dtype(bits, form.codes, str(dtype).removeprefix("torch.")))
    groups = groups_of(inputs, bits, group), columns
    found: dict[str, Shaped] = {"weight": ((columns, depth_of(inputs, bits, group)), kind)}
    if form.has_scales:
        found["scales"] = groups, torch.float32
    if form.has_group_bytes:
        found["group_bytes"] = groups, torch.int8
    if has_bias:
        found["bias"] = (columns,), dtype
    return found


def rounded(rows: torch.Tensor, bits: int) -> Part:
    """Round `rows [N, K]` to `bits` (8 or 4); return weight and scales. 0: the rows as they are."""
    if not bits:
        return {"weight": rows}
    wide = rows.float().numpy()
    step = max(1, BLOCK_ELEMENTS // wide.shape[1])
    blocks = [wide[start : start + step] for start in range(0, len(wide), step)]
    weights, scales = zip(*map(_bytes if bits == 8 else _nibbles, blocks), strict=True)
    return {
        "weight": torch.from_numpy(np.concatenate(weights)),
        "scales": torch.from_numpy(np.ascontiguousarray(np.concatenate(scales).T)),
    }


def kept(rows: StoredRows, form: Form) -> Part:
    """Rearrange stored rows to weight, scales and group bytes, without rounding.

    `form`: the rows' form, which kernels support.
    """
    numbers = _joined(rows.numbers.view(np.uint8), form) if form.bits == 4 else rows.numbers
    weight = torch.from_numpy(np.ascontiguousarray(numbers).view(np.int8))
    count = groups_of(rows.numbers.shape[1], form.bits, form.group)

    def of_groups(each: Array, kind: type[np.generic]) -> torch.Tensor:
        own = each[:, :count].T.astype(kind)
        return torch.from_numpy(np.ascontiguousarray(own))

    if form.codes == E2M1:
        exponents = of_groups(rows.scales, np.uint8).view(torch.int8)
        return {"weight": weight, "group_bytes": exponents}
    part = {"weight": weight, "scales": of_groups(rows.scales, np.float32)}
    if form.codes == E4M3:
        part["weight"] = weight.view(torch.float8_e4m3fn)
    if form.has_offsets:
        offsets = np.zeros_like(rows.scales) if rows.offsets is None else rows.offsets
        part["group_bytes"] = of_groups(offsets, np.int8)
    return part


def columns_in_turn(parts: Sequence[Part]) -> Part:
    """Interleave the columns of several parts: column 0 of each, then column 1 of each."""
    if len(parts) == 1:
        return parts[0]
    return {
        name: _in_turn([part[name] for part in parts], dim=0 if name == "weight" else 1)
        for name in parts[0]
    }


def _in_turn(parts: Sequence[torch.Tensor], dim: int) -> torch.Tensor:
    return torch.stack(list(parts), dim + 1).flatten(dim, dim + 1)


def _joined(codes: Array, form: Form) -> Array:
    """Join codes `[N, K]` of 4 bits two in a byte: `[N, depth]`, as spans of `ops/matrices.py`."""
    span = span_of(form.group)
    codes = np.pad(codes, ((0, 0), (0, -codes.shape[1] % span)))
    low, high = np.split(codes.reshape(len(codes), -1, 2, span // 2), 2, axis=2)
    both: Array = (low & 15) | (high << 4)
    return both.reshape(len(codes), -1)


def in_parts(
    sections: Sequence[Section], form: Form, dtype: torch.dtype, *, in_turn: bool
) -> Iterator[Part]:
    """Parts of a weight made of `sections`: weights some rows at a time, then scales and group
    bytes, then biases in `dtype` if a section has one.

    `in_turn`: interleave the sections row by row; else they follow each other.
    """

    def made(together: Sequence[Section], start: int, stop: int) -> Part:
        return columns_in_turn([_part(each.rows(start, stop), form) for each in together])

    def calls() -> Iterator[Callable[[], Part]]:
        for together in [sections] if in_turn else [[each] for each in sections]:
            features = together[0].features
            for start in range(0, features, ROWS_AT_ONCE):
                yield partial(made, together, start, min(start + ROWS_AT_ONCE, features))

    of_groups: dict[str, list[torch.Tensor]] = {}
    for part in in_order(calls()):
        yield {"weight": part.pop("weight")}
        for name, tensor in part.items():
            of_groups.setdefault(name, []).append(tensor)
    yield {name: torch.cat(parts, 1) for name, parts in of_groups.items()}
    if any(each.bias is not None for each in sections):
        biases = [_bias(each) for each in sections]
        both = _in_turn(biases, 0) if in_turn else torch.cat(biases)
        yield {"bias": both.to(dtype)}


def _part(rows: Array | StoredRows, form: Form) -> Part:
    if isinstance(rows, StoredRows):
        return kept(rows, form)
    return rounded(torch.from_numpy(rows), form.bits)


def _bias(section: Section) -> torch.Tensor:
    if section.bias is None:
        return torch.zeros(section.features)
    return torch.from_numpy(section.bias)


def _bytes(rows: Array) -> tuple[Array, Array]:
    """Round rows to int8; return them and scales `[N, 1]`."""
    scale = np.abs(rows).max(-1, keepdims=True) / np.float32(BYTE_MAX)
    return np.rint(rows * _inverse(scale)).astype(np.int8), scale


def _nibbles(rows: Array) -> tuple[Array, Array]:
    """Round rows to int4; return bytes of two inputs, and scales `[N, groups]`."""
    if rows.shape[1] % GROUP:
        rows = np.pad(rows, ((0, 0), (0, -rows.shape[1] % GROUP)))
    groups = np.ascontiguousarray(rows).reshape(-1, GROUP)
    largest, smallest = groups.max(-1), groups.min(-1)
    extreme = np.where(largest > -smallest, largest, smallest)
    steps = extreme[:, None] * np.array(TRIED, np.float32) / np.float32(NIBBLE_MIN)
    whole, chosen = round_groups(groups, steps)
    scale = np.take_along_axis(steps, chosen[:, None].astype(np.intp), 1)
    return _joined(whole.reshape(len(rows), -1), Form(4)), scale.reshape(len(rows), -1)


def _inverse(scale: Array) -> Array:
    """`1 / scale`; 0 for scales of at most SMALLEST."""
    zeros = np.zeros_like(scale)
    np.divide(np.float32(1), scale, out=zeros, where=np.abs(scale) > SMALLEST)
    return zeros
