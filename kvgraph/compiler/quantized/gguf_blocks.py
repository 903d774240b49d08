"""GGUF: weights that are made of tensors' rows, so that rows are decoded only when they are read.

Kernels support some types of blocks as they are stored; gguf_coded.py reads these.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from kvgraph.compiler.frontends.stored_forms import GGUF_BLOCKS
from kvgraph.compiler.quantized.gguf_coded import CODED
from kvgraph.compiler.values import CodedRows, Rows, Values
from kvgraph.contract.dims import Array
from kvgraph.ops.packed import Form

if TYPE_CHECKING:
    from gguf import ReaderTensor

Read = Callable[["ReaderTensor", slice | Array], Array]
"""`read(tensor, rows)`: some rows of a tensor, as bytes or as numbers."""

Data = Callable[[Read, int, int], Array]
"""`data(read, start, stop)`: rows of a weight, made of what `read` returns of its tensors."""


def stored(tensor: ReaderTensor, rows: slice | Array) -> Array:
    """Rows of a tensor as its file has them."""
    return np.asarray(tensor.data[rows])


def decoded(tensor: ReaderTensor, rows: slice | Array = slice(None)) -> Array:
    """Rows of a tensor in float32. A scale that is not finite gives NaN or Inf, and no warning."""
    from gguf import dequantize

    given = stored(tensor, rows)
    if not given.size:  # the package does not decode none
        return np.empty((*given.shape[:-1], int(tensor.shape[0])), np.float32)
    with np.errstate(invalid="ignore", over="ignore"):
        found: Array = dequantize(given, tensor.tensor_type)
    return found


class Decoded(Values):
    """A weight of one or several tensors, whose rows are decoded when they are read.

    `data`: the weight's rows, in its own order. `is_transposed`: its last two dims are inputs,
    outputs, and those of `data` outputs, inputs.
    """

    dtype = torch.float32

    def __init__(
        self, where: str, shape: Sequence[int], bits: int, data: Data, *, is_transposed: bool
    ) -> None:
        self.where, self.shape, self.bits = where, tuple(shape), bits
        self._data = data
        self.is_coded_transposed = is_transposed

    def open(self) -> Rows:
        if self.is_coded_transposed and len(self.shape) == 2:
            whole = self._data(decoded, 0, self.shape[1]).T
            return lambda start, stop: torch.from_numpy(whole[start:stop].copy())
        return self._rows

    def _rows(self, start: int, stop: int) -> torch.Tensor:
        made = self._data(decoded, start, stop)
        if self.is_coded_transposed:
            made = np.ascontiguousarray(made.swapaxes(-1, -2))
        return torch.from_numpy(made)


class Blocks(Decoded):
    """A weight of one or several tensors in blocks of one type that GGUF_BLOCKS has."""

    def __init__(
        self,
        where: str,
        shape: Sequence[int],
        bits: int,
        data: Data,
        kind: str,
        *,
        is_transposed: bool,
    ) -> None:
        super().__init__(where, shape, bits, data, is_transposed=is_transposed)
        self._form, self._coded = GGUF_BLOCKS[kind], CODED[kind]

    @property
    def form(self) -> Form | None:
        return self._form

    def open_coded(self) -> CodedRows:
        return lambda start, stop: self._coded(self.where, self._data(stored, start, stop), start)


def of_matrix(tensor: ReaderTensor, order: Array) -> Data:
    """Rows of a matrix `[N, K]`. `order`: index in the tensor of each row of the matrix."""
    return lambda read, start, stop: read(tensor, order[start:stop])


def of_experts(tensors: Sequence[ReaderTensor], *, do_alternate: bool) -> Data:
    """Experts of one tensor, or of two: gate above up.

    `do_alternate`: outputs of gate and up alternate.
    """
    in_order = sorted(tensors, key=lambda tensor: tensor.name)  # gate, up

    def data(read: Read, start: int, stop: int) -> Array:
        parts = [read(tensor, slice(start, stop)) for tensor in in_order]
        if do_alternate:
            count, outputs, inputs = parts[0].shape
            return np.stack(parts, 2).reshape(count, outputs * len(parts), inputs)
        return np.concatenate(parts, 1)

    return data


def of_halves(tensors: Sequence[ReaderTensor]) -> Data:
    """Rows of a matrix of two tensors of equal size: gate above up."""
    in_order = sorted(tensors, key=lambda tensor: tensor.name)  # gate, up
    size = len(in_order[0].data)

    def data(read: Read, start: int, stop: int) -> Array:
        parts = [
            read(tensor, slice(max(0, start - size * place), max(0, stop - size * place)))
            for place, tensor in enumerate(in_order)
        ]
        return np.concatenate(parts)

    return data


def kind_of(tensors: Sequence[ReaderTensor]) -> str | None:
    """The one type of blocks of tensors, if kernels support it."""
    kinds = {tensor.tensor_type.name for tensor in tensors}
    kind = kinds.pop()
    return None if kinds or kind not in GGUF_BLOCKS else kind


def do_fit(tensors: Sequence[ReaderTensor], shape: Sequence[int], *, are_transposed: bool) -> bool:
    """Whether tensors of equal shapes make experts, or a matrix, of `shape`."""
    *experts, outputs, inputs = shape
    if are_transposed:
        outputs, inputs = inputs, outputs
    wanted = [inputs, outputs // len(tensors), *experts]
    return all([int(extent) for extent in tensor.shape] == wanted for tensor in tensors)
