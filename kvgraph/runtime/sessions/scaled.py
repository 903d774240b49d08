"""Linear layers of many rows with activations rounded to FP8: torch's FP8 product.

From 256 rows on it takes 0.4 to 0.8 of the time of our fastest kernels, and from 512 on 0.5 to 0.9
of the time of torch's bfloat16 product (docs/results/gpu.md). These times are with the tensor
core's own accumulation; here partial sums are added in float32 at intervals, torch's default.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from kvgraph.kernels.launch import LaunchPlan, plans_by_sizes
from kvgraph.kernels.linear_plan import LinearShape, has_parts, plan_join, plan_round
from kvgraph.ops import QUANTIZED_LINEAR

SCALED_ROWS = 128
"""Most rows for our own kernels. At 128 rows they are faster for the down projection of Llama 3 8B,
and slower for its other layers."""
OUTS = tuple(operand.name for operand in QUANTIZED_LINEAR.outputs)

Operands = Mapping[str, torch.Tensor]


class Scaled:
    """Runs `quantized_linear` of `shape` by `launch`.

    Legend: M rows, K inputs, N columns of the weight.
    """

    def __init__(self, shape: LinearShape, launch: Callable[[LaunchPlan, Operands], None]) -> None:
        self._shape, self._launch = shape, launch
        self._round = plans_by_sizes(plan_round, shape)
        self._join = plans_by_sizes(plan_join, shape) if has_parts(shape) else None

    def run(self, x_MK: torch.Tensor, operands: Operands) -> dict[str, torch.Tensor]:
        """Return the outputs `[M, out_features]` by name. `operands`: those of the op, by name."""
        weight_NK, of_columns_1N = operands["weight"], operands["scales"]
        rounded_MK = torch.empty_like(x_MK, dtype=weight_NK.dtype)
        of_rows_M = x_MK.new_empty(len(x_MK), dtype=torch.float32)
        given = {"x": x_MK, "rounded": rounded_MK, "row_scales": of_rows_M}
        self._launch(self._round(len(x_MK)), given)
        product_MN = torch._scaled_mm(
            rounded_MK,
            weight_NK.T,
            scale_a=of_rows_M[:, None],
            scale_b=of_columns_1N,
            out_dtype=x_MK.dtype,
        )
        if self._join is None:
            return {OUTS[0]: product_MN}
        made = {
            name: x_MK.new_empty(len(x_MK), width)
            for name, width in zip(OUTS, self._shape.out_features, strict=True)
            if width
        }
        self._launch(self._join(len(x_MK)), {**operands, **made, "products": product_MN})
        return made
