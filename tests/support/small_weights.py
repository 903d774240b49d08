"""Models of transformers with the numbers that small weights on a GPU stand for."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from kvgraph.compiler import gpu_weights
from kvgraph.ops.matrices import GROUP, numbers_of


def rounded(weight: torch.Tensor, bits: int) -> torch.Tensor:
    """What `weight [columns, inputs]` is stored as, in float32."""
    part = gpu_weights.rounded(weight.detach().float(), bits)
    inputs = weight.shape[1]
    whole = torch.from_numpy(numbers_of(part["weight"].numpy(), inputs, bits))
    each = GROUP if bits == 4 else inputs
    return whole * part["scales"].T.repeat_interleave(each, 1)[:, :inputs]


def round_weights(model: Any, bits: int) -> None:
    """Of linear layers and experts of `model`, in place; routers keep theirs, and a table that is
    the head's weight too keeps its own."""
    for name, part in model.named_modules():
        if isinstance(part, nn.Linear) and not name.endswith(("gate", "router")):
            part.weight = _kept(part.weight, rounded(part.weight, bits))
        for key, each in list(part.named_parameters(recurse=False)):
            if each.dim() == 3 and key.endswith("_proj"):
                experts = torch.stack([rounded(weight, bits) for weight in each])
                setattr(part, key, _kept(each, experts))


def _kept(old: torch.Tensor, made: torch.Tensor) -> nn.Parameter:
    return nn.Parameter(made.to(old.dtype), requires_grad=False)
