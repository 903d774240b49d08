"""The fusions around the cache ops in torch: CPU forms of their OpSpecs.

A pass inserts them into a program that has kernels for them: on CUDA the runtime registers its
launches, and without these there is no fallback. The CPU form of norms and gates runs the operators
that the pass replaced, so that a rewritten program can be compared with the original bit by bit.
The CPU form of matrix products is the op's reference.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from kvgraph.ops._fused_experts import FUSED_EXPERTS
from kvgraph.ops._quantized_linear import QUANTIZED_LINEAR
from kvgraph.ops._rms_norm import RMS_NORM
from kvgraph.ops._silu_mul import SILU_MUL
from kvgraph.ops.spec import OPSET_DOMAIN, OpSpec
from kvgraph.ops.torch_arrays import array_over, tensor_over
from kvgraph.ops.torch_gradients import refuse_gradients
from kvgraph.ops.torch_ops import Returned, check_call, fake, schema


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

    `residual`: of x's shape and dtype; it becomes `residual + x`, and the sum is normalised.
    `round_first`: round the normalised rows to the dtype before the weight is applied.
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
    """`silu(gate) * up`, both `[..., W]` of one dtype, row-major; rounded after each operator."""
    return torch.nn.functional.silu(gate.contiguous()) * up.contiguous()


def _by_reference(spec: OpSpec) -> Callable[..., Returned]:
    """Function that checks a call and runs the op's reference on the tensors."""

    def call(*args: torch.Tensor | None, **attributes: float) -> Returned:
        check_call(spec, spec.arguments(args, attributes))
        given = [None if tensor is None else array_over(tensor.contiguous()) for tensor in args]
        found = spec.reference(*given, **attributes)
        results = found if isinstance(found, tuple) else (found,)
        tensors = [tensor_over(array, array.dtype.name) for array in results]
        return tensors[0] if len(tensors) == 1 else tuple(tensors)

    return call


_LIBRARY = torch.library.Library(OPSET_DOMAIN, "FRAGMENT")
for _spec, _cpu in (
    (RMS_NORM, _rms_norm),
    (SILU_MUL, _silu_mul),
    (FUSED_EXPERTS, _by_reference(FUSED_EXPERTS)),
    (QUANTIZED_LINEAR, _by_reference(QUANTIZED_LINEAR)),
):
    _LIBRARY.define(schema(_spec))
    _LIBRARY.impl(_spec.name, _cpu, "CPU")
    refuse_gradients(_LIBRARY, _spec.name)
    torch.library.register_fake(f"{OPSET_DOMAIN}::{_spec.name}", fake(_spec), lib=_LIBRARY)

rms_norm = torch.ops.kvgraph.rms_norm
silu_mul = torch.ops.kvgraph.silu_mul
fused_experts = torch.ops.kvgraph.fused_experts
quantized_linear = torch.ops.kvgraph.quantized_linear
