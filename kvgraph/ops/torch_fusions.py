"""The fusions around the cache ops in torch: the computation of their OpSpecs on a CPU.

A pass writes them into a program that has kernels for them: on CUDA the runtime registers its
launches, and nothing stands in where it does not. The CPU form runs the operators that the pass
replaced, so that a rewritten program can be compared with the original bit by bit.
"""

from __future__ import annotations

import torch

from kvgraph.ops._rms_norm import RMS_NORM
from kvgraph.ops._silu_mul import SILU_MUL
from kvgraph.ops.spec import OPSET_DOMAIN
from kvgraph.ops.torch_gradients import refuse_gradients
from kvgraph.ops.torch_ops import fake, schema


def _rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    residual: torch.Tensor | None = None,
    *,
    epsilon: float,
    weight_offset: float = 0.0,
    round_first: bool = False,
) -> torch.Tensor:
    """RMSNorm over the last dim of x `[..., W]` by weight `[W]`, both of one dtype; row-major.

    With `residual`, x's shape and dtype: it becomes `residual + x`, and that is normalised.
    `round_first`: the normalised rows are rounded to the dtype before the weight is applied.
    """
    if residual is not None:
        x = residual.add_(x)
    x = x.contiguous()
    wide = x.float()
    normal = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)
    if round_first:
        normal = normal.to(x.dtype).float()
    return (normal * (weight.float() + weight_offset)).to(x.dtype)


def _silu_mul(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    """`silu(gate) * up`, both `[..., W]` of one dtype, row-major; rounded after either operator."""
    return torch.nn.functional.silu(gate.contiguous()) * up.contiguous()


_LIBRARY = torch.library.Library(OPSET_DOMAIN, "FRAGMENT")
for _spec, _cpu in ((RMS_NORM, _rms_norm), (SILU_MUL, _silu_mul)):
    _LIBRARY.define(schema(_spec))
    _LIBRARY.impl(_spec.name, _cpu, "CPU")
    refuse_gradients(_LIBRARY, _spec.name)
    torch.library.register_fake(f"{OPSET_DOMAIN}::{_spec.name}", fake(_spec), lib=_LIBRARY)

rms_norm = torch.ops.kvgraph.rms_norm
silu_mul = torch.ops.kvgraph.silu_mul
