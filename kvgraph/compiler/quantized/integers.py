"""Weights of integers with a scale, and perhaps an offset, for each row and group of inputs."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from functools import cached_property

import torch

from kvgraph.compiler.quantized.parts import group_of_inputs
from kvgraph.compiler.values import Coded, CodedRows, Plain, Rows, Values
from kvgraph.ops.packed import GROUP, INT8, INTEGERS, Form

NIBBLE_BITS = 4


class Integers(Values):
    """A weight `[N, K]` of values `(number + offset) * scale`.

    Numbers are centred: they start at -2 ** (bits - 1).
    `groups`: number of groups of a row. `index`: the group of each input, if not in order.
    """

    dtype = torch.float32

    def __init__(
        self, where: str, shape: Sequence[int], bits: int, groups: int, index: Plain | None = None
    ) -> None:
        self.where, self.shape = where, tuple(shape)
        self._groups, self._index = groups, index
        is_small = bits <= NIBBLE_BITS and self._has_groups_of_kernels
        self.bits = NIBBLE_BITS if is_small else 8  # four would round other groups again

    @abstractmethod
    def open_numbers(self) -> Rows:
        """A function that reads rows of numbers, `[n, K]`."""

    @abstractmethod
    def scales(self) -> torch.Tensor:
        """The scales `[N, groups]` in float32. ModelError if one is not finite."""

    @abstractmethod
    def offsets(self) -> torch.Tensor | None:
        """The offsets `[N, groups]`, as integers; None: there are none."""

    def open(self) -> Rows:
        numbers, scales, offsets = self.open_numbers(), self.scales(), self.offsets()
        groups = group_of_inputs(self._index, self.shape[1], self._groups)

        def rows(start: int, stop: int) -> torch.Tensor:
            found = numbers(start, stop)
            if offsets is not None:
                found = found.int() + offsets[start:stop][:, groups]
            return found.float() * scales[start:stop][:, groups]

        return rows

    @cached_property
    def _is_in_order(self) -> bool:
        inputs = self.shape[1]
        in_order = group_of_inputs(None, inputs, self._groups)
        return torch.equal(group_of_inputs(self._index, inputs, self._groups), in_order)

    @property
    def _has_groups_of_kernels(self) -> bool:
        each = self.shape[1] // max(1, self._groups)
        is_even = each % GROUP == 0 and each * self._groups == self.shape[1]
        return is_even and self._is_in_order

    @cached_property
    def form(self) -> Form | None:
        """The stored form; None unless groups are in order and kernels have their size. With 8 bits
        there must be no offsets."""
        if not self._is_in_order:
            return None
        offsets = self.offsets()
        has_offsets = offsets is not None and bool(offsets.any())
        if self.bits == 8 and has_offsets:
            return None
        if self.bits == 8 and self._groups == 1:
            return Form(8)
        if not self._has_groups_of_kernels:
            return None
        each = self.shape[1] // self._groups
        return Form(self.bits, each, INT8 if self.bits == 8 else INTEGERS, has_offsets)

    def open_coded(self) -> CodedRows:
        numbers, scales, offsets = self.open_numbers(), self.scales(), self.offsets()

        def rows(start: int, stop: int) -> Coded:
            found = numbers(start, stop)
            stored = (found & 15).to(torch.uint8) if self.bits < 8 else found.to(torch.int8)
            own = None if offsets is None else offsets[start:stop].to(torch.int8)
            return Coded(stored, scales[start:stop], own)

        return rows
