"""GGUF: weights in blocks that kernels support as they are stored.

A block of 32 numbers of one row is a float16 scale and 32 int8 (Q8_0), or such a scale and 16 bytes
(Q4_0), or an exponent and 16 bytes (MXFP4). Bytes have two numbers: the first 16 numbers of a block
are in the low bits, the last 16 in the high bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from kvgraph.compiler.frontends.stored_forms import GGUF_BLOCKS
from kvgraph.compiler.values import Coded, CodedRows, Converted
from kvgraph.contract.dims import Array
from kvgraph.errors import ModelError
from kvgraph.ops.packed import E2M1, Form

if TYPE_CHECKING:
    from gguf import ReaderTensor

NO_EXPONENT = 255
"""The exponent of MXFP4 that is a NaN."""


class Blocks(Converted):
    """A weight of one or several tensors in blocks of one type that GGUF_BLOCKS has.

    `data(start, stop)`: bytes `[..., bytes of a row]` of the weight's rows, in its own order.
    """

    def __init__(
        self,
        where: str,
        shape: Sequence[int],
        compute: Callable[[], torch.Tensor],
        bits: int,
        form: Form,
        data: Callable[[int, int], Array],
        *,
        is_transposed: bool = False,
    ) -> None:
        own = 8 if form.codes == E2M1 else bits  # 4 bits would round floats again
        super().__init__(where, shape, torch.float32, compute, own)
        self._form, self._data = form, data
        self.is_coded_transposed = is_transposed

    @property
    def form(self) -> Form:
        return self._form

    def open_coded(self) -> CodedRows:
        return lambda start, stop: _coded(self.where, self.form, self._data(start, stop), start)


def of_matrix(tensor: ReaderTensor, order: Array) -> Callable[[int, int], Array]:
    """`data` of a matrix `[N, K]`. `order`: index in the tensor of each row of the matrix."""
    return lambda start, stop: np.asarray(tensor.data[order[start:stop]])


def of_experts(
    tensors: Sequence[ReaderTensor], *, do_alternate: bool
) -> Callable[[int, int], Array]:
    """`data` of experts of one tensor, or of two: gate above up.

    `do_alternate`: outputs of gate and up alternate.
    """
    in_order = sorted(tensors, key=lambda tensor: tensor.name)  # gate, up

    def data(start: int, stop: int) -> Array:
        parts = [np.asarray(tensor.data[start:stop]) for tensor in in_order]
        if do_alternate:
            return np.stack(parts, 2).reshape(len(parts[0]), -1, parts[0].shape[-1])
        return np.concatenate(parts, 1)

    return data


def of_halves(tensors: Sequence[ReaderTensor]) -> Callable[[int, int], Array]:
    """`data` of a matrix of two tensors of equal size: gate above up."""
    in_order = sorted(tensors, key=lambda tensor: tensor.name)  # gate, up
    size = len(in_order[0].data)

    def data(start: int, stop: int) -> Array:
        parts = [
            tensor.data[max(0, start - size * place) : max(0, stop - size * place)]
            for place, tensor in enumerate(in_order)
        ]
        return np.concatenate(parts)

    return data


def are_stored(
    tensors: Sequence[ReaderTensor], shape: Sequence[int], *, are_transposed: bool
) -> bool:
    """Whether tensors of one type of blocks that kernels support make experts, or a matrix, of
    `shape`."""
    *experts, outputs, inputs = shape
    if are_transposed:
        outputs, inputs = inputs, outputs
    wanted = [inputs, outputs // len(tensors), *experts]
    kinds = {tensor.tensor_type.name for tensor in tensors}
    return (
        len(kinds) == 1
        and not kinds - GGUF_BLOCKS.keys()
        and all([int(extent) for extent in tensor.shape] == wanted for tensor in tensors)
    )


def _coded(where: str, form: Form, data: Array, first: int) -> Coded:
    """Rows from bytes `[..., bytes of a row]`. ModelError for a scale that is not finite.

    `first`: the place of the first row in the weight `where`, for errors.
    """
    scale_bytes = 1 if form.codes == E2M1 else 2
    number_bytes = form.group * form.bits // 8
    blocks = data.reshape(*data.shape[:-1], -1, scale_bytes + number_bytes)
    given = np.ascontiguousarray(blocks[..., :scale_bytes])
    if form.codes == E2M1:
        scales = given[..., 0]
        is_bad = scales == NO_EXPONENT
    else:
        scales = given.view("<f2")[..., 0].astype(np.float32)
        is_bad = ~np.isfinite(scales)
    if is_bad.any():
        at = tuple(int(each) for each in np.argwhere(is_bad)[0])
        got = f"{'exponent ' if form.codes == E2M1 else ''}{scales[at]:g}"
        raise ModelError(
            f"{where}[{first + at[0]}]: block {at[-1]}: expected a finite scale, got {got}"
        )
    numbers = blocks[..., scale_bytes:]
    if form.bits == 8:
        numbers = np.ascontiguousarray(numbers).view(np.int8)
    else:
        numbers = np.concatenate([numbers & 15, numbers >> 4], -1)
        if form.codes != E2M1:
            numbers ^= 8
    found = torch.from_numpy(numbers.reshape(*data.shape[:-1], -1))
    return Coded(found, torch.from_numpy(scales))
