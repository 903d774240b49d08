"""Read FP8 and FP4 numbers with their scales."""

from __future__ import annotations

from collections.abc import Collection

import torch

from kvgraph.compiler.frontends.found_instead import damaged
from kvgraph.compiler.quantized.parts import Parts, read_finite, require_finite
from kvgraph.compiler.values import Coded, CodedRows, Plain, Rows, Values
from kvgraph.ops.packed import E2M1, E4M3, GROUP, LEVELS, NVFP4, Form, least_group

FLOAT8 = "F8_E4M3"
PAIRS = torch.from_numpy(LEVELS[E2M1][[[byte & 15, byte >> 4] for byte in range(256)]])
"""The two FP4 numbers of each byte: `[256, 2]`."""

Block = tuple[int, int]


class Scaled(Values):
    """FP8 numbers `[N, K]` or `[E, N, K]`, each times the scale of its block.

    `scales`: one for each block of the last two dims, or one in all; `is_inverse`: their inverses.
    Blocks at the edges may be smaller.
    """

    dtype = torch.float32
    stored_bits = 8

    def __init__(
        self, numbers: Plain, scales: Plain, block: Block, *, is_inverse: bool = False
    ) -> None:
        self.where, self.shape = numbers.where, numbers.shape
        self._numbers, self._scales, self._block = numbers, scales, block
        self._is_inverse = is_inverse

    def open(self) -> Rows:
        numbers, of_rows = self._numbers.open(), self._open_scales()
        columns = torch.arange(self.shape[-1]) // self._block[1]

        def rows(start: int, stop: int) -> torch.Tensor:
            return numbers(start, stop).float() * of_rows(start, stop)[..., columns]

        return rows

    def _open_scales(self) -> Rows:
        """A function that reads the scales of rows: `[n, blocks]`, or `[n, N, blocks]`."""
        scales, height = read_finite(self._scales), self._block[0]
        if self._is_inverse:
            scales = require_finite(self._scales, 1 / scales)
        if scales.numel() == 1:
            return lambda start, stop: scales.reshape(1, 1).expand(
                (stop - start, *self.shape[1:-1], 1)
            )
        scales = scales.reshape(*self.shape[:-2], -(-self.shape[-2] // height), -1)
        if len(self.shape) == 3:
            of_rows = torch.arange(self.shape[1]) // height
            return lambda start, stop: scales[start:stop, of_rows]
        return lambda start, stop: scales[torch.arange(start, stop) // height]

    @property
    def form(self) -> Form | None:
        """The stored form; None if kernels have no groups of the block's width."""
        return None if self._block[1] % GROUP else Form(8, self._block[1], E4M3)

    def open_coded(self) -> CodedRows:
        numbers, of_rows = self._numbers.open(), self._open_scales()

        def rows(start: int, stop: int) -> Coded:
            found = numbers(start, stop)
            self._require_numbers(start, found)
            return Coded(found.view(torch.uint8), of_rows(start, stop))

        return rows

    def _require_numbers(self, first: int, numbers: torch.Tensor) -> None:
        odd = numbers.view(torch.uint8) & 127 == 127
        if odd.any():
            at = [int(i) for i in odd.nonzero()[0]]
            place = f"{self.where}{[first + at[0], *at[1:]]}"
            raise damaged(place, "a finite number", "nan")


def scaled(
    parts: Parts,
    numbers: Plain,
    scales: Plain,
    block: Block | None,
    sizes: Collection[int] = (),
    *,
    is_inverse: bool = False,
) -> Values:
    """The values of FP8 `numbers` with `scales`: one in all, or one for each row, group or block.

    `block`: height and width of a block, if the configuration names one.
    `sizes`: allowed group sizes; empty: any size. `is_inverse`: numbers are divided by `scales`.
    ModelError: the shape of `scales` fits none of these.
    """
    parts.require_matrices(numbers)
    *leading, height, width = numbers.shape
    shapes: dict[tuple[int, ...], Block] = {(): (height, width), (1,): (height, width)}
    shapes[(*leading, 1, 1)] = height, width
    shapes[(*leading, height, 1)] = shapes[(*leading, height)] = 1, width
    if block is not None:
        grid = tuple(-(-size // each) for size, each in zip((height, width), block, strict=True))
        shapes[(*leading, *grid)] = shapes[(*leading, grid[0], 1, grid[1], 1)] = block
    groups = scales.shape[-1] if scales.shape else 1
    each, rest = divmod(width, max(1, groups))
    if rest == 0 and (not sizes or each in sizes):
        shapes.setdefault((*leading, height, groups), (1, each))
    parts.require_shape(scales, *shapes)
    form = shapes[scales.shape]
    parts.kinds.add(_kind(form, height, width))
    return Scaled(numbers, scales, form, is_inverse=is_inverse)


def _kind(block: Block, height: int, width: int) -> str:
    if block == (height, width):
        return "one scale"
    if block[0] > 1:
        return f"blocks of {block[0]} x {block[1]}"
    return "a scale a row" if block[1] == width else f"groups of {block[1]}"


class FourBits(Values):
    """FP4 numbers, two in a byte, with a scale for each group of inputs.

    `numbers`: uint8 `[..., N, K / 2]`, or `[..., N, G, K / G / 2]`; the lower bits come first.
    `scales`: `[..., N, G]`; bytes are exponents, other types are floats.
    `whole`: a number by which scales are divided or, if `is_factor`, multiplied.
    `transposed`: swap the last two dims of the result.
    """

    dtype = torch.float32
    bits = 8  # 4 bits would round them again, with larger groups

    def __init__(
        self,
        numbers: Plain,
        scales: Plain,
        whole: Plain | None = None,
        *,
        is_factor: bool = False,
        transposed: bool = False,
    ) -> None:
        self.where = numbers.where
        leading = scales.shape[:-1]
        inputs = 2 * torch.Size(numbers.shape[len(leading) :]).numel()
        shape = (*leading, inputs)
        self.shape = (*shape[:-2], shape[-1], shape[-2]) if transposed else shape
        self._numbers, self._scales = numbers, scales
        self._whole, self._is_factor = whole, is_factor
        self._transposed = self.is_coded_transposed = transposed
        self._group = inputs // scales.shape[-1]

    def open(self) -> Rows:
        numbers = self._numbers.open()
        scales = read_finite(self._scales)
        whole = self._read_whole()
        if whole is not None:
            scales = scales * whole if self._is_factor else scales / whole

        def rows(start: int, stop: int) -> torch.Tensor:
            bytes_ = numbers(start, stop)
            of_rows = scales[start:stop]
            grouped = PAIRS.index_select(0, bytes_.flatten().int()).reshape(*of_rows.shape, -1)
            found = (grouped * of_rows[..., None]).flatten(-2)
            return found.transpose(-1, -2) if self._transposed else found

        return rows

    @property
    def form(self) -> Form | None:
        """The stored form: E2M1 with exponents only, or NVFP4 with E4M3 scales and one factor; None
        for any other scales, or if kernels have no such group size."""
        if self._scales.dtype == torch.uint8 and self._whole is None:
            codes = E2M1
        elif self._scales.stored.dtype == FLOAT8 and self._whole is not None:
            codes = NVFP4
        else:
            return None
        return None if self._group % least_group(codes) else Form(4, self._group, codes)

    def open_coded(self) -> CodedRows:
        numbers, scales = self._numbers.open(), self._scales.read().view(torch.uint8)
        read_finite(self._scales)  # raises ModelError for a NaN
        whole = self._read_whole()
        factor = whole if whole is None or self._is_factor else 1 / whole

        def rows(start: int, stop: int) -> Coded:
            bytes_, of_rows = numbers(start, stop), scales[start:stop]
            nibbles = bytes_.short()
            nibbles |= nibbles << 4
            nibbles &= 0x0F0F  # in memory the low one is first
            leading = of_rows.shape[:-1]
            factors = None if factor is None else factor.expand(*leading, 1)
            return Coded(nibbles.view(torch.uint8).reshape(*leading, -1), of_rows, factors=factors)

        return rows

    def _read_whole(self) -> torch.Tensor | None:
        """The number for all scales, `[1]`. ModelError if it, or its inverse if used, is not
        finite."""
        if self._whole is None:
            return None
        whole = read_finite(self._whole).reshape(1)
        if not self._is_factor:
            require_finite(self._whole, 1 / whole)
        return whole
