"""Tensors of a checkpoint that are read only when used, and tensors that are made of these.

`open` does the work that is needed once, and returns a function that reads rows: half-open ranges
of the first dim. So a tensor can be written or packed with only some of its rows in memory.
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

from kvgraph.compiler.checkpoint_files import StoredTensor
from kvgraph.compiler.frontends.found_instead import INSTEAD
from kvgraph.compiler.joined_forms import PLAIN_BITS
from kvgraph.compiler.threads import in_order
from kvgraph.contract.dtypes import ALL
from kvgraph.errors import ModelError
from kvgraph.ops.packed import Form, least_group

PIECE_BYTES = 16 << 20

Rows = Callable[[int, int], torch.Tensor]
"""`rows(start, stop)` reads rows `[stop - start, ...]`."""

TORCH_DTYPES = {dtype.safetensors: getattr(torch, dtype.name) for dtype in ALL}
TORCH_DTYPES["F8_E8M0"] = torch.uint8
"""safetensors' name of a dtype -> torch dtype. Exponents (F8_E8M0) are read as bytes."""


@dataclass(frozen=True)
class Coded:
    """Rows `[..., N, K]` as a checkpoint stores them, in a `Form` that kernels support.

    `numbers`: int8 or bytes of E4M3 for 8 bits; for 4 bits, uint8 codes as in `ops.packed.LEVELS`.
    `scales`: `[..., N, groups]`, float32; exponents for E2M1, bytes of E4M3 for NVFP4.
    `offsets`: int8 with the shape of `scales`, added to each number; for EIGHTHS in eighths.
    `factors`: `[..., N, 1]`, float32, for NVFP4.
    """

    numbers: torch.Tensor
    scales: torch.Tensor
    offsets: torch.Tensor | None = None
    factors: torch.Tensor | None = None

    def spread(self, times: int) -> Coded:
        """The same rows with groups `times` smaller, so scales and offsets are repeated."""
        offsets = None if self.offsets is None else self.offsets.repeat_interleave(times, -1)
        scales = self.scales.repeat_interleave(times, -1)
        return Coded(self.numbers, scales, offsets, self.factors)

    def map(self, change: Callable[[torch.Tensor], torch.Tensor]) -> Coded:
        """The result of `change` on each tensor; it must act on dims that all tensors share."""
        return replace(self, **{name: change(part) for name, part in parts_of(self)})


def parts_of(coded: Coded) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors of `coded` that are present, with their names."""
    named = ((each.name, getattr(coded, each.name)) for each in fields(coded))
    return ((name, part) for name, part in named if part is not None)


CodedRows = Callable[[int, int], Coded]

Part = TypeVar("Part", torch.Tensor, Coded)


class Values(ABC):
    """A tensor of a checkpoint that is not in memory.

    `where`: its name in errors. `dtype`: a dtype that holds its values without further rounding.
    """

    where: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    bits: int = PLAIN_BITS
    """Bits of the packed weights that are nearest to its stored form."""
    stored_bits: int = PLAIN_BITS
    """Bits of a number in the checkpoint: 8 for FP8, although `bits` are those of a plain one."""
    least_bits: int = PLAIN_BITS
    """Fewest `bits` of the tensors that it is made of, if they are several."""
    plain_dtype: torch.dtype | None = None
    """The checkpoint's dtype of its numbers, if all are stored as they are in one dtype."""
    x_bits: int = 0
    """Bits to which the checkpoint's maker rounds the layer's inputs at run time; 0: none."""
    is_coded_transposed: bool = False
    """Whether its last two dims are inputs, outputs, and those of coded rows outputs, inputs."""

    @abstractmethod
    def open(self) -> Rows:
        """A function that reads rows; a scalar counts as one row. ModelError for a damaged file."""

    @property
    def form(self) -> Form | None:
        """The stored form, if kernels support it; None: it can only be read as numbers."""
        return None

    def open_coded(self) -> CodedRows:
        """A function that reads stored rows; only for a tensor with a form."""
        raise NotImplementedError(self.where)

    @property
    def is_packed(self) -> bool:
        """Whether the checkpoint has fewer bits of it than of a plain tensor."""
        return min(self.bits, self.stored_bits) < PLAIN_BITS

    @property
    def count(self) -> int:
        """Number of rows: the first extent, or 1 for a scalar."""
        return self.shape[0] if self.shape else 1

    def pieces(self) -> Iterator[torch.Tensor]:
        """Read all rows in order, in pieces of about PIECE_BYTES."""
        rows = self.open()
        row_bytes = torch.Size(self.shape[1:]).numel() * self.dtype.itemsize
        step = max(1, PIECE_BYTES // max(1, row_bytes))
        yield from in_order(
            partial(rows, start, min(start + step, self.count))
            for start in range(0, self.count, step)
        )

    def read(self) -> torch.Tensor:
        """Read the whole tensor."""
        return self.open()(0, self.count).reshape(self.shape)


class Plain(Values):
    """A tensor as a shard stores it; it may hold integers."""

    def __init__(self, stored: StoredTensor) -> None:
        self.stored = stored
        self.where = f"{stored.path}: {stored.name}"
        self.shape = stored.shape
        self.dtype = self.plain_dtype = TORCH_DTYPES[stored.dtype]

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
        """Fill `rows` from the file. Several reads may be needed, as each may return fewer bytes.

        ModelError if the file ends too early.
        """
        raw = rows.reshape(-1).view(torch.uint8).numpy().data
        while len(raw):
            count = file.readinto(raw)
            if not count:
                raise ModelError(f"{self.where}: expected more bytes, got none")
            raw = raw[count:]


class Converted(Values):
    """A tensor that a library computes from others; `compute` returns it whole."""

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
    """A tensor that is made of another one, and has its stored form."""

    def __init__(
        self, source: Values, shape: Sequence[int] | None = None, dtype: torch.dtype | None = None
    ) -> None:
        self.where, self.bits, self.x_bits = source.where, source.bits, source.x_bits
        self.stored_bits, self.least_bits = source.stored_bits, source.least_bits
        self.plain_dtype = source.plain_dtype
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
    """Another tensor in a given dtype. A number that is not finite in it raises ModelError when it
    is read."""

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
        # aminmax takes a fiftieth of the time of a test of each element, and returns a NaN if any.
        if not cast.numel() or all(extreme.isfinite() for extreme in torch.aminmax(cast)):
            return
        at = tuple(int(i) for i in (~cast.isfinite()).nonzero()[0])
        index = [at[0] + row, *at[1:]] if self.shape else ""
        holds = str(cast.dtype).removeprefix("torch.")
        raise ModelError(
            f"{self.where}{index}: expected a finite number in {holds}, got {float(piece[at]):g}"
            f"{f'; {INSTEAD}' if self.is_packed else ''}"
        )


class Head(Derived):
    """The first rows of another tensor."""

    def __init__(self, whole: Values, count: int) -> None:
        super().__init__(whole, (count, *whole.shape[1:]))


class Turned(Derived):
    """A matrix of another tensor: `rows` and `columns` are the dims that make each of its dims.

    By default the transpose of a matrix, which has a stored form if coded rows are its columns.
    """

    def __init__(
        self, source: Values, rows: Sequence[int] = (1,), columns: Sequence[int] = (0,)
    ) -> None:
        sizes = [math.prod(source.shape[dim] for dim in dims) for dims in (rows, columns)]
        super().__init__(source, sizes)
        self._order = (*rows, *columns)
        self.is_coded_transposed = not source.is_coded_transposed

    def open(self) -> Rows:
        whole = self._source.read().permute(self._order)
        whole = whole if whole.dim() == len(self.shape) else whole.reshape(self.shape)
        return lambda start, stop: whole[start:stop].contiguous()

    @property
    def form(self) -> Form | None:
        return self._source.form if self._order == (1, 0) and not self.is_coded_transposed else None


@dataclass(frozen=True)
class Share:
    """The part of a tensor that a rank has.

    `dim`: the dim that is cut. `parts`: relative sizes of parts that are packed along it; the rank
    has an equal share of each.
    """

    dim: int
    parts: tuple[int, ...]
    ranks: int
    rank: int

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        spans = self.rows(tensor.shape[self.dim])
        shares = [tensor.narrow(self.dim, first, end - first) for first, end in spans]
        return torch.cat(shares, self.dim) if len(shares) > 1 else shares[0]

    def rows(self, count: int) -> list[tuple[int, int]]:
        """Half-open ranges of the share along a dim of extent `count`, one for each part."""
        unit, start, spans = count // sum(self.parts), 0, []
        for part in self.parts:
            own = part * unit // self.ranks
            spans.append((start + self.rank * own, start + (self.rank + 1) * own))
            start += part * unit
        return spans


class Cut(Derived):
    """A rank's share of another tensor."""

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
        """The stored form; None if the inputs are cut and no group size of kernels divides the
        share."""
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
        """The dim that is cut, in coded rows."""
        dim, last = self._share.dim, len(self.shape) - 1
        return 2 * last - 1 - dim if self.is_coded_transposed and dim >= last - 1 else dim

    def open_coded(self) -> CodedRows:
        share, whole, form = replace(self._share, dim=self._coded_dim), self._source.form, self.form
        assert whole is not None
        assert form is not None
        times = whole.group // form.group if form.group else 1
        is_input = self._cuts_inputs

        def cut(found: Coded) -> Coded:
            if is_input and not form.group:  # all inputs of a row share one scale
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
    """A function that reads rows of a share of a tensor with `count` rows.

    If rows are cut (dim 0), it joins the share's own rows; else it calls `cut` on all rows read.
    """
    if share.dim:
        return lambda start, stop: cut(rows(start, stop))
    own = share.rows(count)
    return lambda start, stop: join([rows(*span) for span in _within(own, start, stop)])


def combined(
    parts: Sequence[Coded], combine: Callable[[list[torch.Tensor]], torch.Tensor]
) -> Coded:
    """The result of `combine` on each tensor of all `parts`, which have the same ones."""
    names = [name for name, _ in parts_of(parts[0])]
    return Coded(**{name: combine([getattr(part, name) for part in parts]) for name in names})


def joined(parts: Sequence[Coded]) -> Coded:
    """Join coded rows along the first dim."""
    return combined(parts, torch.cat)


def _within(spans: Sequence[tuple[int, int]], start: int, stop: int) -> Iterator[tuple[int, int]]:
    """The subranges that hold entries `start` to `stop` of the concatenated `spans`."""
    at = 0
    for first, end in spans:
        low, high = max(start - at, 0), min(stop - at, end - first)
        if low < high:
            yield first + low, first + high
        at += end - first
