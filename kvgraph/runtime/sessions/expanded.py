"""Linear layers of many rows over quantized weights: torch's product with the expanded weight.

For 2,048 rows, a product of torch's library takes 22 to 47 % of the time of a kernel that converts
numbers as it multiplies. Above CONVERTED_ROWS, this saves more time than it takes to expand the
weight to the activations' dtype (docs/results/gpu.md). The weight is expanded in pieces, into the
same memory; the pieces are large, as a launch from Python takes longer than a small piece.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch

from kvgraph.contract.dtypes import itemsize
from kvgraph.kernels.launch import LaunchPlan, plan_silu_mul, plans_by_sizes
from kvgraph.kernels.linear_plan import (
    EXPANDED_COLUMNS,
    LinearShape,
    gate_variant,
    plan_expand,
    plan_round,
)

CONVERTED_ROWS, ROUNDED_ROWS = 512, 1024
"""Most rows for which a converting kernel is used: both ways take about as long there. ROUNDED_ROWS
is for activations that are rounded, and is an estimate."""
PIECE = 128 << 20
"""Most bytes of a weight that are expanded at a time."""

Operands = Mapping[str, torch.Tensor]


class Expanded:
    """Runs `quantized_linear` of `shape` by `launch`, on GPUs of `arch`.

    Legend: M rows, K inputs, N columns of an output.
    """

    def __init__(
        self, shape: LinearShape, arch: str, launch: Callable[[LaunchPlan, Operands], None]
    ) -> None:
        self._shape, self._launch = shape, launch
        self.least_rows = (ROUNDED_ROWS if shape.rounds else CONVERTED_ROWS) + 1
        self._restore = plans_by_sizes(_plan_restore, shape) if shape.rounds else None
        self._expand = plans_by_sizes(plan_expand, shape, arch)
        self._gate = plans_by_sizes(plan_silu_mul, gate_variant(shape)) if shape.gated else None
        column = shape.in_features * itemsize(shape.dtype)
        self._columns = max(PIECE // column // EXPANDED_COLUMNS, 1) * EXPANDED_COLUMNS

    def run(self, x_MK: torch.Tensor, operands: Operands, outs_MN: Sequence[torch.Tensor]) -> None:
        """Write `outs_MN`. `operands`: those of the op, by name."""
        if self._restore is not None:
            given = {"x": x_MK, "restored": (x_MK := torch.empty_like(x_MK))}
            self._launch(self._restore(len(x_MK)), given)
        if self._gate is None:
            for first, plain_NK, bias_N in self._pieces(x_MK, operands):
                begin = 0  # of an output among the weight's columns
                for out_MN in outs_MN:
                    ends = first, first + len(plain_NK)
                    low, high = (min(max(n - begin, 0), out_MN.shape[1]) for n in ends)
                    own = slice(begin + low - first, begin + high - first)
                    if low < high:
                        _multiply(x_MK, plain_NK[own], _part(bias_N, own), out_MN[:, low:high])
                    begin += out_MN.shape[1]
            return
        (gate_MN,) = outs_MN
        both_MN = gate_MN, torch.empty_like(gate_MN)
        for first, plain_NK, bias_N in self._pieces(x_MK, operands):
            for turn, half_NK in enumerate(plain_NK.chunk(2)):
                bias = _part(bias_N, slice(turn, None, 2))
                out_MN = both_MN[turn][:, first // 2 : (first + len(plain_NK)) // 2]
                _multiply(x_MK, half_NK, bias, out_MN)
        # In place: each element is read before it is written.
        given = {"gate": gate_MN, "up": both_MN[1], "out": gate_MN}
        self._launch(self._gate(len(gate_MN)), given)

    def _pieces(
        self, x_MK: torch.Tensor, operands: Operands
    ) -> Iterator[tuple[int, torch.Tensor, torch.Tensor | None]]:
        """Yield the pieces of the expanded weight: first column, columns `[columns, K]` (gates
        first), and their bias. Each piece overwrites the previous one."""
        columns, bias_N = self._shape.columns, operands.get("bias")
        memory = x_MK.new_empty(min(self._columns, columns), self._shape.in_features)
        for first in range(0, columns, self._columns):
            plain_NK = memory[: columns - first]
            count = len(plain_NK)
            self._launch(self._expand(first, count), {**operands, "plain": plain_NK})
            yield first, plain_NK, _part(bias_N, slice(first, first + count))


def _plan_restore(shape: LinearShape, rows: int) -> LaunchPlan:
    return plan_round(shape, rows, restores=True)


def _part(bias_N: torch.Tensor | None, own: slice) -> torch.Tensor | None:
    return None if bias_N is None else bias_N[own]


def _multiply(
    x_MK: torch.Tensor, plain_NK: torch.Tensor, bias_N: torch.Tensor | None, out_MN: torch.Tensor
) -> None:
    if bias_N is None:
        torch.mm(x_MK, plain_NK.T, out=out_MN)
    else:
        torch.addmm(bias_N, x_MK, plain_NK.T, out=out_MN)
