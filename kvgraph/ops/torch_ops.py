"""The ops in torch: schemas, fakes and CPU kernels, generated from the OpSpecs.

The torch form mutates (`kv_blocks!`). The functional form of `update_and_attend`, which returns the
pool as an output, exists only in graphs that are exported to ONNX; torch cannot run it. No torch
headers are needed: a Library in Python costs about 2 us a call (torch.library, torch 2.13).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch

from kvgraph.contract.dtypes import ALL
from kvgraph.errors import KernelError
from kvgraph.ops import native
from kvgraph.ops._update_and_attend import UPDATE_AND_ATTEND
from kvgraph.ops.check import OperandType, check
from kvgraph.ops.signatures import docstring, signature_of
from kvgraph.ops.spec import OPSET_DOMAIN, OpSpec
from kvgraph.ops.specs import ALL_SPECS
from kvgraph.ops.torch_gradients import refuse_gradients

DTYPE_NAMES = {getattr(torch, dtype.name): dtype.name for dtype in ALL}

FUNCTIONAL = "update_and_attend_functional"

Tensors = Mapping[str, torch.Tensor | None]
Returned = torch.Tensor | tuple[torch.Tensor, ...] | None


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
    given = ", ".join([*inputs, *(["*", *attributes] if attributes else [])])
    result = returns[0] if len(returns) == 1 else f"({', '.join(returns)})"
    name = FUNCTIONAL if functional else spec.name
    return f"{name}({given}) -> {result}"


def _dtype(tensor: torch.Tensor) -> str:
    return DTYPE_NAMES.get(tensor.dtype) or str(tensor.dtype).removeprefix("torch.")


def _operand(tensor: torch.Tensor | None) -> native.NativeOperand:
    return None if tensor is None else (tensor.data_ptr(), _dtype(tensor), tuple(tensor.shape))


def _dense(spec: OpSpec, name: str, tensor: torch.Tensor | None) -> torch.Tensor | None:
    if tensor is None or tensor.is_contiguous():
        return tensor
    if name in spec.mutated:
        raise _strided(spec, name, tensor)
    return tensor.contiguous()


def _strided(spec: OpSpec, name: str, tensor: torch.Tensor) -> KernelError:
    return KernelError(
        f"{spec.name}: {name}: expected a contiguous buffer to write in place, "
        f"got strides {tuple(tensor.stride())}"
    )


def _results(spec: OpSpec, inputs: Tensors, attributes: Mapping[str, Any]) -> list[torch.Tensor]:
    """Allocate the outputs; an output that the attributes leave out is empty."""
    if not spec.results:
        return []
    operand = spec.inputs[0]
    first = inputs[operand.name]
    assert first is not None
    if operand.dims_of(first.dim()) is None:
        raise KernelError(
            f"{spec.name}: {operand.name}: expected rank {len(operand.dims)}, got {first.dim()}"
        )
    shapes = [None if tensor is None else tensor.shape for tensor in inputs.values()]
    dtypes = [None if tensor is None else tensor.dtype for tensor in inputs.values()]
    return [
        first.new_empty(
            (0,) * len(out.dims)
            if out.is_left_out(attributes)
            else spec.extents(out, shapes, attributes),
            dtype=spec.type_of(out, dtypes, lambda name: getattr(torch, name)),
        )
        for out in spec.results
    ]


def _outputs(
    spec: OpSpec, inputs: Tensors, results: Sequence[torch.Tensor]
) -> list[torch.Tensor | None]:
    """All outputs in order: an aliased input itself, None for an output that is left out."""
    outputs, made = [], iter(results)
    for out in spec.outputs:
        tensor = inputs[out.alias] if out.alias else next(made)
        left_out = out.optional and tensor is not None and not tensor.shape[-1]
        outputs.append(None if left_out else tensor)
    return outputs


def _returned(out: list[torch.Tensor]) -> Returned:
    return tuple(out) if len(out) > 1 else out[0] if out else None


def _cpu_kernel(spec: OpSpec) -> Callable[..., Returned]:
    names = [operand.name for operand in spec.inputs]

    def call(*args: torch.Tensor | None, **attributes: float) -> Returned:
        given = dict(zip(names, args, strict=False))
        inputs = {name: _dense(spec, name, given.get(name)) for name in names}
        out = _results(spec, inputs, attributes)
        operands = [*inputs.values(), *_outputs(spec, inputs, out)]
        native.call(spec, [_operand(tensor) for tensor in operands], attributes)
        return _returned(out)

    return call


def fake(spec: OpSpec) -> Callable[..., Returned]:
    """Function for traced calls: it checks the operands and returns results without values."""

    def call(*args: torch.Tensor | None, **attributes: float) -> Returned:
        given = spec.arguments(args, attributes)
        _require_no_values(spec, given)
        return _returned(check_call(spec, given))

    return call


def _require_no_values(spec: OpSpec, given: Mapping[str, Any]) -> None:
    """Raise KernelError for a tensor on meta among tensors with values: nothing would be computed.

    A call with all its tensors on meta is allowed.
    """
    kinds = {o.name: x.device.type for o in spec.inputs if (x := given[o.name]) is not None}
    without = next((name for name, kind in kinds.items() if kind == "meta"), None)
    others = {name: kind for name, kind in kinds.items() if kind != "meta"}
    if without is not None and others:
        name, kind = next(iter(others.items()))
        raise KernelError(
            f"{spec.name}: {without}: expected a tensor on {kind}, as {name} is, got one on meta, "
            "without values"
        )


def check_call(spec: OpSpec, given: Mapping[str, Any]) -> list[torch.Tensor]:
    """Check a call and return its results without values.

    `given`: inputs and attributes by name (`spec.arguments`). KernelError if no value of symbolic
    extents makes the call valid; symbolic extents stay symbolic.
    """
    inputs: Tensors = {operand.name: given[operand.name] for operand in spec.inputs}
    attributes = {a.name: given[a.name] for a in spec.attributes}
    results = _results(spec, inputs, attributes)
    operands = [*inputs.values(), *_outputs(spec, inputs, results)]
    check(spec, [_described(tensor) for tensor in operands], attributes, differ=known_to_differ)
    for name in spec.mutated:
        _require_dense(spec, name, inputs[name])
    return results


def _described(tensor: torch.Tensor | None) -> OperandType:
    return None if tensor is None else (_dtype(tensor), tuple(tensor.shape))


def known_to_differ(a: int | torch.SymInt, b: int | torch.SymInt) -> bool:
    """Whether two extents differ for every value of their symbols; it adds no guard."""
    if type(a) is int and type(b) is int:
        return a != b
    from torch.fx.experimental.symbolic_shapes import statically_known_true

    return statically_known_true(a != b)


def _require_dense(spec: OpSpec, name: str, tensor: torch.Tensor | None) -> None:
    """Raise KernelError for a buffer that is row-major for no value of its symbolic dims."""
    if tensor is None:
        return
    step: int | torch.SymInt = 1
    for extent, stride in zip(reversed(tensor.shape), reversed(tensor.stride()), strict=True):
        if known_to_differ(extent, 1) and known_to_differ(stride, step):
            raise _strided(spec, name, tensor)
        step = step * extent


def _fake_functional(spec: OpSpec) -> Callable[..., Returned]:
    names = [operand.name for operand in spec.inputs]
    made = fake(spec)

    def call(*args: torch.Tensor | None, **attributes: float) -> Returned:
        given = dict(zip(names, args, strict=False))
        pools = [given.get(output.alias) for output in spec.outputs if output.alias]
        # A pool that is left out is returned as an empty tensor: schemas have no None output.
        handed_on = [args[0].new_empty(0) if p is None else torch.empty_like(p) for p in pools]  # type: ignore[union-attr]
        return (cast(torch.Tensor, made(*args, **attributes)), *handed_on)

    return call


_LIBRARY = torch.library.Library(OPSET_DOMAIN, "DEF")
for _spec in ALL_SPECS:
    _LIBRARY.define(schema(_spec))
    _LIBRARY.impl(_spec.name, _cpu_kernel(_spec), "CPU")
    refuse_gradients(_LIBRARY, _spec.name)
    torch.library.register_fake(f"{OPSET_DOMAIN}::{_spec.name}", fake(_spec), lib=_LIBRARY)

_LIBRARY.define(schema(UPDATE_AND_ATTEND, functional=True))
torch.library.register_fake(
    f"{OPSET_DOMAIN}::{FUNCTIONAL}", _fake_functional(UPDATE_AND_ATTEND), lib=_LIBRARY
)

for _spec in ALL_SPECS:  # for `help` and editors
    _function = getattr(torch.ops.kvgraph, _spec.name)
    _function.__signature__ = signature_of(_spec, torch.Tensor)
    _function.__doc__ = docstring(_spec)

all_gather = torch.ops.kvgraph.all_gather
all_reduce = torch.ops.kvgraph.all_reduce
experts = torch.ops.kvgraph.experts
linear = torch.ops.kvgraph.linear
route = torch.ops.kvgraph.route
store_kv = torch.ops.kvgraph.store_kv
paged_attention = torch.ops.kvgraph.paged_attention
update_and_attend = torch.ops.kvgraph.update_and_attend
update_and_attend_functional = torch.ops.kvgraph.update_and_attend_functional
