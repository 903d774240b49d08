"""Numbers of a checkpoint, read where they are used: a stored tensor, or what is made of several.

`open` does what is done once, and returns a function that reads rows: half-open ranges of the first
dim. So a tensor is written, or packed, while no more of it is in memory than its form asks for.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from io import FileIO
from typing import TypeVar

import torch

from kvgraph.compiler.shards import Stored
from kvgraph.compiler.threads import in_order
from kvgraph.contract.dtypes import ALL
from kvgraph.errors import ModelError
from kvgraph.ops.packed import Form, least_group

PIECE_BYTES = 16 << 20

PLAIN_BITS = 16
"""Of packed weights that are nearest to a plain checkpoint's."""

Rows = Callable[[int, int], torch.Tensor]
"""`rows(start, stop)`: `[stop - start, ...]`."""

TORCH_DTYPES = {dtype.safetensors: getattr(torch, dtype.name) for dtype in ALL}
TORCH_DTYPES["F8_E8M0"] = torch.uint8
"""Of safetensors' names. Exponents without numbers are bytes, whatever a file calls them."""

FLOATS = frozenset(d.safetensors for d in ALL if d.kind == "float" and not d.largest)
"""Stored numbers that are weights as they are."""


@dataclass(frozen=True)
class Coded:
    """Rows `[..., N, K]` as they are stored, in a `Form` that kernels take.

    `numbers`: of 8 bits int8; of 4, uint8 codes as `ops.packed.LEVELS` numbers them. `scales`
    `[..., N, groups]`: float32, of E2M1 their exponents, of NVFP4 bytes of E4M3. `offsets` int8, as
    scales are, added to each number. `factors` `[..., N, 1]`, of NVFP4: float32.
    """

    numbers: torch.Tensor
    scales: torch.Tensor
    offsets: torch.Tensor | None = None
    factors: torch.Tensor | None = None

    def spread(self, times: int) -> Coded:
        """In groups of as many times fewer inputs."""
        offsets = None if self.offsets is None else self.offsets.repeat_interleave(times, -1)
        scales = self.scales.repeat_interleave(times, -1)
        return Coded(self.numbers, scales, offsets, self.factors)

    def map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Coded:
        """Each part changed, along dims that they share."""
        return replace(self, **{name: change(part) for name, part in parts_of(self)})


def parts_of(coded: Coded) -> Iterator[tuple[str, torch.Tensor]]:
    """Its tensors, by name."""
    named = ((each.name, getattr(coded, each.name)) for each in fields(coded))
    return ((name, part) for name, part in named if part is not None)


CodedRows = Callable[[int, int], Coded]

Part = TypeVar("Part", torch.Tensor, Coded)


class Values(ABC):
    """A tensor of a checkpoint that is not in memory.

    `where` names it in errors. `dtype` holds its numbers without another rounding.
    """

    where: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    bits: int = PLAIN_BITS
    """Of packed weights, those nearest to how it is stored."""
    stored_bits: int = PLAIN_BITS
    """Of a number in the checkpoint: of FP8 8, where `bits` are those of a plain one."""
    x_bits: int = 0
    """That the checkpoint's maker rounds its inputs to, as they come; 0: they are not rounded."""
    is_coded_transposed: bool = False
    """Its last two dims are inputs and outputs; those of its coded rows are outputs and inputs."""

    @abstractmethod
    def open(self) -> Rows:
        """What reads its rows; a number is one row. ModelError for a damaged file."""

    @property
    def form(self) -> Form | None:
        """How a kernel takes it as it is stored; None: it is only read as numbers."""
        return None

    def open_coded(self) -> CodedRows:
        """What reads rows of a tensor that has a form."""
        raise NotImplementedError(self.where)

    @property
    def count(self) -> int:
        """Of rows."""
        return self.shape[0] if self.shape else 1

    def pieces(self) -> Iterator[torch.Tensor]:
        """Its rows in order, a few at a time."""
        rows = self.open()
        row_bytes = torch.Size(self.shape[1:]).numel() * self.dtype.itemsize
        step = max(1, PIECE_BYTES // max(1, row_bytes))
        yield from in_order(
            partial(rows, start, min(start + step, self.count))
            for start in range(0, self.count, step)
        )

    def read(self) -> torch.Tensor:
        """The whole tensor."""
        return self.open()(0, self.count).reshape(self.shape)


def in_groups(source: Values, group: int) -> CodedRows:
    """Coded rows of `source` with a scale for `group` inputs, which divide its own; 0: for those of
    its form."""
    rows, form = source.open_coded(), source.form
    assert form is not None
    times = form.group // group if group else 1
    return rows if times == 1 else lambda start, stop: rows(start, stop).spread(times)


class Plain(Values):
    """A tensor as a shard has it, integers too."""

    def __init__(self, stored: Stored) -> None:
        self.stored = stored
        self.where = f"{stored.path}: {stored.name}"
        self.shape = stored.shape
        self.dtype = TORCH_DTYPES[stored.dtype]

    def open(self) -> Rows:
        return self._rows

    def _rows(self, start: int, stop: int) -> torch.Tensor:
        rows = torch.empty((stop - start, *self.shape[1:]), dtype=self.dtype)
        row_bytes = torch.Size(self.shape[1:]).numel() * self.dtype.itemsize
        with self.stored.path.open("rb", buffering=0) as file:
            file.seek(self.stored.offset + start * row_bytes)
            self._fill(rows, file)
        return rows

    def _fill(self, rows: torch.Tensor, file: FileIO) -> None:
        """A read may give less than asked for."""
        raw = rows.reshape(-1).view(torch.uint8).numpy().data
        while len(raw):
            count = file.readinto(raw)
            if not count:
                raise ModelError(f"{self.where}: expected more bytes, got none")
            raw = raw[count:]


class Converted(Values):
    """A tensor that a library computes from others: `compute` gives the whole of it."""

    def __init__(
        self,
        where: str,
        shape: Sequence[int],
        dtype: torch.dtype,
        compute: Callable[[], torch.Tensor],
        bits: int = PLAIN_BITS,
    ) -> None:
        self.where, self.shape, self.dtype, self.bits = where, tuple(shape), dtype, bits
        self._compute = compute

    def open(self) -> Rows:
        whole = self._compute()
        return lambda start, stop: whole[start:stop]


class Derived(Values):
    """What is made of another tensor, and stored as that one is."""

    def __init__(
        self, source: Values, shape: Sequence[int] | None = None, dtype: torch.dtype | None = None
    ) -> None:
        self.where, self.bits, self.x_bits = source.where, source.bits, source.x_bits
        self.stored_bits = source.stored_bits
        self.shape = source.shape if shape is None else tuple(shape)
        self.dtype = dtype or source.dtype
        self.is_coded_transposed = source.is_coded_transposed
        self._source = source

    def open(self) -> Rows:
        return self._source.open()

    @property
    def form(self) -> Form | None:
        return self._source.form

    def open_coded(self) -> CodedRows:
        return self._source.open_coded()


class Cast(Derived):
    """Another in a dtype, whose numbers are finite in both: else ModelError as they are read."""

    def __init__(self, source: Values, dtype: torch.dtype) -> None:
        super().__init__(source, dtype=dtype)

    def open(self) -> Rows:
        rows = self._source.open()

        def cast(start: int, stop: int) -> torch.Tensor:
            piece = rows(start, stop)
            made = piece.to(self.dtype)
            self._require_finite(start, piece, made)
            return made

        return cast

    def _require_finite(self, row: int, piece: torch.Tensor, cast: torch.Tensor) -> None:
        # The extremes cost a fiftieth of a look at each element, and a NaN is both.
        if not cast.numel() or all(extreme.isfinite() for extreme in torch.aminmax(cast)):
            return
        at = tuple(int(i) for i in (~cast.isfinite()).nonzero()[0])
        index = [at[0] + row, *at[1:]] if self.shape else ""
        holds = str(cast.dtype).removeprefix("torch.")
        raise ModelError(
            f"{self.where}{index}: expected a finite number in {holds}, got {float(piece[at]):g}"
        )


class Head(Derived):
    """The first rows of another."""

    def __init__(self, whole: Values, count: int) -> None:
        super().__init__(whole, (count, *whole.shape[1:]))


@dataclass(frozen=True)
class Share:
    """The part of a tensor that a rank has: its share along `dim` of each of the `parts` that are
    packed there, whose widths are to each other as these numbers are."""

    dim: int
    parts: tuple[int, ...]
    ranks: int
    rank: int

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        spans = self.rows(tensor.shape[self.dim])
        shares = [tensor.narrow(self.dim, first, end - first) for first, end in spans]
        return torch.cat(shares, self.dim) if len(shares) > 1 else shares[0]

    def rows(self, count: int) -> list[tuple[int, int]]:
        """Half-open ranges of the rows of `count` that hold it."""
        unit, start, spans = count // sum(self.parts), 0, []
        for part in self.parts:
            own = part * unit // self.ranks
            spans.append((start + self.rank * own, start + (self.rank + 1) * own))
            start += part * unit
        return spans


class Cut(Derived):
    """A rank's share of another."""

    def __init__(self, whole: Values, share: Share) -> None:
        shape = list(whole.shape)
        shape[share.dim] //= share.ranks
        super().__init__(whole, shape)
        self._share = share

    def open(self) -> Rows:
        share = self._share
        return _rows_of(share, self._source.count, self._source.open(), share.of, torch.cat)

    @property
    def form(self) -> Form | None:
        """None where a share of the inputs ends within every group that kernels have."""
        form = self._source.form
        if form is None or not self._cuts_inputs or not form.group:
            return form
        group = math.gcd(form.group, self.shape[self._share.dim])
        fits = len(self._share.parts) == 1 and group % least_group(form.codes) == 0
        return replace(form, group=group) if fits else None

    @property
    def _cuts_inputs(self) -> bool:
        return self._coded_dim == len(self.shape) - 1

    @property
    def _coded_dim(self) -> int:
        """Of the share, in coded rows."""
        dim, last = self._share.dim, len(self.shape) - 1
        return 2 * last - 1 - dim if self.is_coded_transposed and dim >= last - 1 else dim

    def open_coded(self) -> CodedRows:
        share, whole, form = replace(self._share, dim=self._coded_dim), self._source.form, self.form
        assert whole is not None
        assert form is not None
        times = whole.group // form.group if form.group else 1
        is_input = self._cuts_inputs

        def cut(found: Coded) -> Coded:
            if is_input and not form.group:  # a scale that all have
                return replace(found, numbers=share.of(found.numbers))
            of_groups = found.spread(times)
            if is_input and found.factors is not None:
                own = replace(of_groups, factors=None).map(share.of)
                return replace(own, factors=found.factors)
            return of_groups.map(share.of)

        return _rows_of(share, self._source.count, self._source.open_coded(), cut, joined)


def _rows_of(
    share: Share,
    count: int,
    rows: Callable[[int, int], Part],
    cut: Callable[[Part], Part],
    join: Callable[[list[Part]], Part],
) -> Callable[[int, int], Part]:
    """What reads rows of a share of `count` rows: `cut` of each, or those that are its own."""
    if share.dim:
        return lambda start, stop: cut(rows(start, stop))
    own = share.rows(count)
    return lambda start, stop: join([rows(*span) for span in _within(own, start, stop)])


def joined(parts: Sequence[Coded]) -> Coded:
    """Rows behind each other."""
    names = [name for name, _ in parts_of(parts[0])]
    return Coded(**{name: torch.cat([getattr(part, name) for part in parts]) for name in names})


def _within(spans: Sequence[tuple[int, int]], start: int, stop: int) -> Iterator[tuple[int, int]]:
    """The parts of `spans`, one behind the other, that are numbers `start` to `stop` of all."""
    at = 0
    for first, end in spans:
        low, high = max(start - at, 0), min(stop - at, end - first)
        if low < high:
            yield first + low, first + high
        at += end - first
