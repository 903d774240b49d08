"""Convert weights of linear layers to the packed form that kvgraph's CPU ops read (ops/packed.py).

Decision: weights are rounded to nearest, without calibration. So a compile needs no data, and the
loss is measured (kvgraph/quality). An int4 multiplier is the one with the least squared error.
Weights that are kept in a checkpoint's own form are not rounded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial

import ml_dtypes
import numpy as np

from kvgraph.compiler.threads import in_order
from kvgraph.contract.dims import Array
from kvgraph.ops.native import round_groups
from kvgraph.ops.packed import (
    COLUMNS,
    E4M3,
    FP4,
    GROUP,
    LINE_BYTES,
    PER_LINE,
    Form,
    num_groups,
    padded_depth,
    panel_count,
    stored_dtype,
)

NIBBLE_MAX, MULTIPLIER_MAX = 7, 16
TRIED = 4
"""Number of smaller multipliers to try below the one that holds a group's largest weight. Clipping
may lower the error."""

PART_ELEMENTS = 1 << 21
"""Elements of a weight that are read at once: 8 MiB of float32."""

BLOCK_ELEMENTS = 1 << 18
"""float32 elements that are rounded at once: 1 MiB stays in the processor's cache, and packing
threads wait little for Python's lock (docs/results/compile.md)."""


@dataclass(frozen=True)
class Packed:
    """Operands of `kvgraph.linear` except x and the residual; None: there is no such operand."""

    bits: int
    weight: Array
    scales: Array | None = None
    group_bytes: Array | None = None
    bias: Array | None = None


OPERANDS = tuple(each.name for each in fields(Packed) if each.name != "bits")


@dataclass(frozen=True)
class StoredRows:
    """Rows `[n, K]` as a checkpoint stores them: int8 numbers or uint8 codes.

    Scales and offsets of groups are `[n, groups]`. Scales are exponents for E2M1, and bytes of E4M3
    for NVFP4, which has factors `[n, 1]` too.
    """

    numbers: Array
    scales: Array
    offsets: Array | None = None
    factors: Array | None = None

    def rows(self, start: int, stop: int) -> StoredRows:
        named = ((each.name, getattr(self, each.name)) for each in fields(self))
        return StoredRows(**{name: part[start:stop] for name, part in named if part is not None})


@dataclass(frozen=True)
class Section:
    """A linear layer `[N, K]`. `rows(start, stop)` reads some of its N rows, in float32 or as
    stored."""

    features: int
    rows: Callable[[int, int], Array | StoredRows]
    bias: Array | None = None

    @classmethod
    def of(cls, weight: Array, bias: Array | None = None) -> Section:
        return cls(len(weight), lambda start, stop: weight[start:stop], bias)

    @classmethod
    def kept(cls, stored: StoredRows, bias: Array | None = None) -> Section:
        """The section of a layer whose stored rows are all in memory."""
        return cls(len(stored.numbers), stored.rows, bias)


def pack_in_parts(
    sections: Sequence[Section], width: int, form: Form, *, interleave: bool = False
) -> Iterator[Packed]:
    """Pack layers `[N, width]` one after the other, and yield some panels at a time.

    `interleave`: two sections take turns panel by panel.
    Columns are padded to panels and the width to `DEPTH`, with zeros. Stored rows are not rounded.
    """
    has_bias = any(each.bias is not None for each in sections)
    each = [sections] if interleave else [[section] for section in sections]
    return pack_in_turn(each, width, form, has_bias=has_bias)


def pack_in_turn(
    each: Iterable[Sequence[Section]], width: int, form: Form, *, has_bias: bool
) -> Iterator[Packed]:
    """Pack groups of sections one after the other, and yield some panels at a time.

    Two sections in a group take turns panel by panel. `each` is iterated on the caller's thread;
    rows are read and packed on other threads.
    """
    step = max(1, PART_ELEMENTS // (COLUMNS * padded_depth(width)))

    def packed(together: Sequence[Section], span: range) -> Packed:
        parts = [_pack_panels(section, span, width, form, has_bias) for section in together]
        return parts[0] if len(parts) == 1 else Packed(form.bits, **_arrays(parts, _in_turn))

    def calls() -> Iterator[Callable[[], Packed]]:
        for together in each:
            count = panel_count(together[0].features)
            for first in range(0, count, step):
                yield partial(packed, together, range(first, min(first + step, count)))

    return in_order(calls())


def shapes(
    features: Sequence[int], width: int, form: Form, has_bias: bool
) -> dict[str, tuple[tuple[int, ...], str]]:
    """Shape and dtype of each operand that `pack_in_parts` makes of sections of `features`."""
    panels, depth, bits = sum(map(panel_count, features)), padded_depth(width), form.bits
    groups = num_groups(width, form.group)
    line = COLUMNS * PER_LINE[bits] if bits >= 16 else LINE_BYTES
    found: dict[str, tuple[tuple[int, ...], str]] = {}
    found["weight"] = ((panels, depth // PER_LINE[bits], line), stored_dtype(bits, form.codes))
    if form.has_scales:
        found["scales"] = (panels, form.num_scales(width), COLUMNS), "float32"
    if form.group and form.has_group_bytes:
        found["group_bytes"] = (panels, groups, COLUMNS), "int8"
    elif bits == 4 and not form.group:
        found["group_bytes"] = (panels, groups, COLUMNS // 2), "int8"
    if has_bias:
        found["bias"] = (panels, COLUMNS), "float32"
    return found


def _arrays(parts: Sequence[Packed], join: Callable[[list[Array]], Array]) -> dict[str, Array]:
    present = [name for name in OPERANDS if getattr(parts[0], name) is not None]
    return {name: join([getattr(part, name) for part in parts]) for name in present}


def joined(parts: Iterable[Packed]) -> Packed:
    """The operands whose panels are those of `parts`, one after the other."""
    found = list(parts)
    return Packed(found[0].bits, **_arrays(found, np.concatenate))


def _in_turn(arrays: list[Array]) -> Array:
    """Interleave arrays panel by panel."""
    return np.stack(arrays, 1).reshape(-1, *arrays[0].shape[1:])


def _pack_panels(section: Section, span: range, width: int, form: Form, has_bias: bool) -> Packed:
    """Read and pack the panels `span` of a section."""
    columns = slice(span.start * COLUMNS, min(span.stop * COLUMNS, section.features))
    found = section.rows(columns.start, columns.stop)
    if isinstance(found, StoredRows):
        packed = _keep(found, width, form)
    else:
        rows = _in_panels(found, padded_depth(width))
        step = max(1, BLOCK_ELEMENTS // rows[0].size)
        blocks = [rows[start : start + step] for start in range(0, len(rows), step)]
        packed = joined(_pack_block(block, form.bits) for block in blocks)
    if not has_bias:
        return packed
    bias = np.zeros(len(span) * COLUMNS, np.float32)
    if section.bias is not None:
        own = section.bias[columns]
        bias[: len(own)] = own
    return replace(packed, bias=bias.reshape(-1, COLUMNS))


def _keep(stored: StoredRows, width: int, form: Form) -> Packed:
    """Pack stored rows of whole panels without rounding."""
    numbers = _in_panels(stored.numbers, padded_depth(width))
    if not form.group:
        scale = _in_panels(stored.scales, 1)[..., 0].astype(np.float32)
        return Packed(8, _lines(numbers, 8), _scales(scale, numbers))
    words = _words(np.ascontiguousarray(numbers).view(np.uint8), form.bits)
    lines = np.ascontiguousarray(words.transpose(0, 2, 1)).view(np.int8)
    if form.codes == E4M3:
        lines = lines.view(ml_dtypes.float8_e4m3fn)
    lines = lines.reshape(len(numbers), -1, LINE_BYTES)
    scales = _of_groups(stored.scales, width, form)
    if form.codes in FP4:
        factors = None
        if stored.factors is not None:
            factors = _in_panels(stored.factors, 1).transpose(0, 2, 1).astype(np.float32)
        return Packed(form.bits, lines, factors, group_bytes=scales.view(np.int8))
    offsets = np.zeros_like(scales, np.int8)
    if stored.offsets is not None:
        offsets = _of_groups(stored.offsets, width, form)
    return Packed(
        form.bits, lines, scales.astype(np.float32), offsets if form.has_offsets else None
    )


def _words(codes: Array, bits: int) -> Array:
    """The words of codes, which are bytes, `[panels, COLUMNS, K]`; `IN_LINE` of kvgraph.ops.packed
    says where each is. All codes of a word are moved at once."""
    if bits == 8:
        four = codes.view("<u4")
        return four & 0xFF0000FF | (four & 0xFF00) << 8 | four >> 8 & 0xFF00
    eight = codes.view("<u8")
    every_second, to_top = np.uint64(0x000F000F000F000F), np.uint64(0x0001001001001000)
    even, odd = eight & every_second, eight >> 8 & every_second
    words: Array = (even * to_top >> 48 | odd * to_top >> 48 << 16).astype("<u4")
    return words


def _of_groups(each: Array, width: int, form: Form) -> Array:
    """Rearrange data of groups: `[n, groups]` -> `[panels, groups, COLUMNS]`.

    Groups beyond `width` inputs are dropped or padded with zeros.
    """
    own = each[:, : -(-width // form.group)]
    panels = _in_panels(own, num_groups(width, form.group))
    return np.ascontiguousarray(panels.transpose(0, 2, 1))


def _in_panels(rows: Array, depth: int) -> Array:
    """Reshape rows `[n, K]` to `[panels, COLUMNS, depth]`, padded with zeros."""
    count, width = rows.shape
    short = -count % COLUMNS, depth - width
    if any(short):
        rows = np.pad(rows, [(0, missing) for missing in short])
    return rows.reshape(-1, COLUMNS, depth)


def _pack_block(rows: Array, bits: int) -> Packed:
    """Round and pack `rows [panels, COLUMNS, K]` to lines, scales with column sums, multipliers."""
    if bits == 32:
        return Packed(bits, _lines(rows, 32))
    if bits == 16:
        return Packed(bits, _lines(_bfloat16(rows), 16))
    if bits == 8:
        scale = _largest(rows) / np.float32(127)
        stored = rows / _divisor(scale)[..., None]
        stored = np.rint(stored, out=stored).astype(np.int8)
        return Packed(bits, _lines(stored, 8), _scales(scale, stored))
    scale, nibbles, factors = _two_level(rows)
    exact = (nibbles * factors.astype(np.int8)[..., None]).reshape(rows.shape)
    words = nibbles.reshape(*rows.shape[:2], -1).view(np.uint32)
    both = (words[..., 1::2] << 4) & 0xF0F0F0F0 | words[..., 0::2] & 0x0F0F0F0F
    lines = _lines(both.view(np.int8), 8)
    less_one = (factors - 1).astype(np.uint8).transpose(0, 2, 1)
    pairs = (less_one[..., 0::2] | less_one[..., 1::2] << 4).view(np.int8)
    return Packed(bits, lines, _scales(scale, exact), np.ascontiguousarray(pairs))


def _bfloat16(rows: Array) -> Array:
    """Round to bfloat16, ties to even; faster than ml_dtypes, which converts number by number."""
    bits = np.ascontiguousarray(rows).view(np.uint32)
    rounded = bits >> 16
    rounded &= 1
    rounded += 0x7FFF
    rounded += bits
    rounded >>= 16
    return rounded.astype(np.uint16).view(ml_dtypes.bfloat16)


def _lines(stored: Array, bits: int) -> Array:
    """Rearrange `[panels, COLUMNS, K]` to `[panels, lines, 64 bytes]`: 4 bytes of each column in
    turn."""
    panels, columns = stored.shape[:2]
    words = np.ascontiguousarray(stored).view(np.uint32)
    by_line = np.ascontiguousarray(words.transpose(0, 2, 1))
    return by_line.view(stored.dtype).reshape(panels, -1, columns * PER_LINE[bits])


def _scales(scale: Array, stored: Array) -> Array:
    return np.stack([scale, stored.sum(-1, dtype=np.int32).astype(np.float32)], 1)


def _largest(rows: Array) -> Array:
    """The largest magnitude along the last dim."""
    most: Array = np.maximum(rows.max(-1), -rows.min(-1))
    return most


def _divisor(scale: Array) -> Array:
    return np.where(scale == 0, np.float32(1), scale)


def _two_level(rows: Array) -> tuple[Array, Array, Array]:
    """Round rows to int4. Return column scales, nibbles `[panels, COLUMNS, groups, GROUP]` and the
    groups' multipliers."""
    groups = np.ascontiguousarray(rows).reshape(*rows.shape[:2], -1, GROUP)
    by_input = np.abs(groups.reshape(-1, GROUP).T, order="C")  # short rows are slow in NumPy
    largest = by_input.max(0).reshape(groups.shape[:-1])
    scale = largest.max(-1) / np.float32(NIBBLE_MAX * MULTIPLIER_MAX)
    divisor = _divisor(scale)[..., None]
    whole = np.clip(np.ceil(largest / (NIBBLE_MAX * divisor)), 1, MULTIPLIER_MAX)
    factors = np.maximum(whole[..., None] - np.arange(TRIED + 1, dtype=np.float32), 1)
    steps = factors * divisor[..., None]
    nibbles, chosen = round_groups(groups.reshape(-1, GROUP), steps.reshape(-1, TRIED + 1))
    kept = np.take_along_axis(factors, chosen.reshape(*whole.shape, 1).astype(np.intp), -1)
    return scale, nibbles.reshape(groups.shape), kept[..., 0].astype(np.int16)
