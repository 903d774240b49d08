"""The ops in torch: schemas, fakes and CPU kernels, generated from the OpSpecs.

torch form mutates (`kv_blocks!`). The functional form of `update_and_attend`, which hands the pool
on as an output, exists only in graphs on their way to ONNX and cannot be run by torch.
Needs no torch headers: a Library in Python costs about 2 us a call (torch.library, 2.11 to 2.13).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from kvgraph.errors import KernelError
from kvgraph.ops import native
from kvgraph.ops._linear import LINEAR
from kvgraph.ops._paged_attention import PAGED_ATTENTION
from kvgraph.ops._store_kv import STORE_KV
from kvgraph.ops._update_and_attend import UPDATE_AND_ATTEND
from kvgraph.ops.spec import OPSET_DOMAIN, OpSpec

DTYPE_NAMES = {
    torch.float32: "float32",
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
    torch.int8: "int8",
    torch.float8_e4m3fn: "float8_e4m3fn",
    torch.int32: "int32",
}

FUNCTIONAL = "update_and_attend_functional"


def schema(spec: OpSpec, *, functional: bool = False) -> str:
    """torch schema of `spec`; mutated inputs carry an alias annotation unless `functional`."""
    letters = iter("abcdef")
    inputs = []
    for operand in spec.inputs:
        mutates = operand.name in spec.mutated and not functional
        kind = f"Tensor({next(letters)}!)" if mutates else "Tensor"
        inputs.append(f"{kind}{'? ' if operand.optional else ' '}{operand.name}")
        inputs[-1] += "=None" if operand.optional else ""
    attributes = [
        f"{a.kind} {a.name}" + ("" if a.default is None else f"={a.default}")
        for a in spec.attributes
    ]
    returns = ["Tensor"] * len(spec.outputs if functional else spec.results)
    result = returns[0] if len(returns) == 1 else f"({', '.join(returns)})"
    name = FUNCTIONAL if functional else spec.name
    return f"{name}({', '.join(inputs)}, *, {', '.join(attributes)}) -> {result}"


def _operand(tensor: torch.Tensor | None) -> native.NativeOperand:
    if tensor is None:
        return None
    return tensor.data_ptr(), DTYPE_NAMES[tensor.dtype], tuple(tensor.shape)


def _dense(spec: OpSpec, name: str, tensor: torch.Tensor | None) -> torch.Tensor | None:
    if tensor is None or tensor.is_contiguous():
        return tensor
    if name in spec.mutated:
        raise KernelError(
            f"{spec.name}: {name}: expected a contiguous buffer to write in place, "
            f"got strides {tuple(tensor.stride())}"
        )
    return tensor.contiguous()


def _results(
    spec: OpSpec, inputs: dict[str, torch.Tensor | None], attributes: dict[str, Any]
) -> list[torch.Tensor]:
    """New memory for the outputs; one that the attributes leave out is empty."""
    if not spec.results:
        return []
    first = inputs[spec.inputs[0].name]
    assert first is not None
    if spec is LINEAR:
        widths = [attributes.get(str(out.dims[-1])) or 0 for out in spec.results]
        return [first.new_empty((first.shape[0] if w else 0, w)) for w in widths]
    width = attributes.get("v_head_dim") or first.shape[2]
    return [first.new_empty((first.shape[0], first.shape[1], width))]


def _returned(out: list[torch.Tensor]) -> Any:
    return tuple(out) if len(out) > 1 else out[0] if out else None


def _cpu_kernel(spec: OpSpec) -> Callable[..., Any]:
    names = [operand.name for operand in spec.inputs]

    def call(*args: torch.Tensor | None, **attributes: Any) -> Any:
        given = dict(zip(names, args, strict=False))
        inputs = {name: _dense(spec, name, given.get(name)) for name in names}
        out = _results(spec, inputs, attributes)
        operands = [_operand(inputs[name]) for name in names]
        results = iter(out)
        for output in spec.outputs:
            if output.alias:
                operands.append(_operand(inputs[output.alias]))
                continue
            made = next(results)
            left_out = output.optional and not made.shape[-1]
            operands.append(None if left_out else _operand(made))
        native.call(spec, operands, attributes)
        return _returned(out)

    return call


def _fake(spec: OpSpec) -> Callable[..., Any]:
    names = [operand.name for operand in spec.inputs]

    def call(*args: torch.Tensor | None, **attributes: Any) -> Any:
        given = dict.fromkeys(names) | dict(zip(names, args, strict=False))
        return _returned(_results(spec, given, attributes))

    return call


def _fake_functional(spec: OpSpec) -> Callable[..., Any]:
    names = [operand.name for operand in spec.inputs]
    fake = _fake(spec)

    def call(*args: torch.Tensor | None, **attributes: Any) -> Any:
        given = dict(zip(names, args, strict=False))
        pools = [given.get(output.alias) for output in spec.outputs if output.alias]
        # A pool that is left out is handed on as an empty tensor: schemas have no None output.
        handed_on = [args[0].new_empty(0) if p is None else torch.empty_like(p) for p in pools]  # type: ignore[union-attr]
        return (fake(*args, **attributes), *handed_on)

    return call


_LIBRARY = torch.library.Library(OPSET_DOMAIN, "DEF")
for _spec in (STORE_KV, PAGED_ATTENTION, UPDATE_AND_ATTEND, LINEAR):
    _LIBRARY.define(schema(_spec))
    _LIBRARY.impl(_spec.name, _cpu_kernel(_spec), "CPU")
    torch.library.register_fake(f"{OPSET_DOMAIN}::{_spec.name}", _fake(_spec), lib=_LIBRARY)

_LIBRARY.define(schema(UPDATE_AND_ATTEND, functional=True))
torch.library.register_fake(
    f"{OPSET_DOMAIN}::{FUNCTIONAL}", _fake_functional(UPDATE_AND_ATTEND), lib=_LIBRARY
)

linear = torch.ops.kvgraph.linear
store_kv = torch.ops.kvgraph.store_kv
paged_attention = torch.ops.kvgraph.paged_attention
update_and_attend = torch.ops.kvgraph.update_and_attend
update_and_attend_functional = torch.ops.kvgraph.update_and_attend_functional
