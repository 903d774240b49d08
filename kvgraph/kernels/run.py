"""Launch a plan on torch tensors: by Triton's interpreter on a CPU, by its compiler on a GPU."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from kvgraph.kernels.launch import Launch, LaunchPlan


def run(plan: LaunchPlan, operands: Mapping[str, torch.Tensor]) -> None:
    """Run the launches of a plan in order. `operands`: tensors by parameter name; outputs and
    mutated operands are written.

    float8_e4m3fn operands are passed as bytes. Scratch memory is allocated here.
    """
    if not plan.launches:
        return
    device = next(iter(operands.values())).device
    tensors = {name: _as_passed(tensor) for name, tensor in operands.items()}
    for name, dtype in plan.scratch_dtypes().items():
        elements = plan.scratch[name]
        own = torch.empty(elements, dtype=getattr(torch, dtype), device=device)
        tensors[name] = _as_passed(own)
    for launch in plan.launches:
        _start(launch, tensors)


def _start(launch: Launch, tensors: Mapping[str, torch.Tensor]) -> None:
    variant = launch.variant
    given: dict[str, object] = dict.fromkeys(variant.absent)
    for parameter, argument in zip(variant.parameters, launch.arguments, strict=True):
        given[parameter.name] = tensors[argument] if isinstance(argument, str) else argument
    variant.kernel.function()[launch.grid](
        **given,
        **variant.constants,
        num_warps=variant.num_warps,
        num_stages=variant.num_stages,
    )


def _as_passed(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8) if tensor.dtype == torch.float8_e4m3fn else tensor
