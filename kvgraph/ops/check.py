"""Checks of a call's shapes, dtypes and attributes against its OpSpec before it runs.

The native kernels make the same checks at every call, with the same messages
(plugins/cpu/check.cpp), so that an error reads the same in tracing and at run time.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias

from kvgraph.contract.dims import split_dim
from kvgraph.errors import KernelError
from kvgraph.ops.spec import Operand, OpSpec, Rule

if TYPE_CHECKING:
    import torch

Extent: TypeAlias = "int | torch.SymInt"
"""An int, or a framework's symbol for an int that is not known yet."""

OperandType = tuple[str, tuple[Extent, ...]] | None
"""(dtype name, shape) of an operand; None if it is left out."""

Differ = Callable[[Extent, Extent], bool]


def check(
    spec: OpSpec,
    operands: Sequence[OperandType],
    attributes: Mapping[str, float],
    *,
    differ: Differ = operator.ne,
) -> None:
    """Raise KernelError for the first wrong operand (inputs, then outputs) or attribute.

    `attributes`: all attributes of the op. `differ`: whether two extents are known to differ;
    extents that are not known are checked by the kernels.
    """
    call = _Call(spec, differ)
    for operand, given in zip(spec.inputs + spec.outputs, operands, strict=True):
        call.bind(operand, given)
    call.require_rules(attributes)


class _Call:
    """State of one check: each dim and type variable, with the operand that set it."""

    def __init__(self, spec: OpSpec, differ: Differ) -> None:
        self._spec = spec
        self._differ = differ
        self._dtypes: dict[str, str | None] = {}
        self._variables: dict[str, tuple[str, str]] = {}
        self._dims: dict[str, tuple[str, Extent]] = {}

    def bind(self, operand: Operand, given: OperandType) -> None:
        self._dtypes[operand.name] = given[0] if given else None
        if given is None:
            if not operand.optional and operand.alias is None:
                self._refuse(operand.name, "a tensor", "none")
            return
        dtype, shape = given
        self._bind_dtype(operand, dtype)
        dims = operand.dims_of(len(shape))
        if dims is None:
            self._refuse(operand.name, f"rank {len(operand.dims)}", len(shape))
        for axis, (dim, extent) in enumerate(zip(dims, shape, strict=True)):
            self._bind_dim(operand, axis, dim, extent)

    def _bind_dtype(self, operand: Operand, dtype: str) -> None:
        if dtype not in operand.dtypes:
            self._refuse(operand.name, f"dtype {' or '.join(operand.dtypes)}", dtype)
        if operand.type_variable:
            owner, expected = self._variables.setdefault(
                operand.type_variable, (operand.name, dtype)
            )
            if dtype != expected:
                self._refuse(operand.name, f"dtype {expected} of {owner}", dtype)

    def _bind_dim(self, operand: Operand, axis: int, dim: str | int, extent: Extent) -> None:
        if isinstance(dim, int):
            if self._differ(extent, dim):
                self._refuse(f"{operand.name}: dim {axis}", dim, extent)
            return
        symbol, offset = split_dim(dim)
        if isinstance(extent, int) and extent < offset:
            self._refuse(f"{operand.name}: dim {dim}", f"at least {offset}", extent)
        owner, expected = self._dims.setdefault(symbol, (operand.name, extent - offset))
        if self._differ(extent, expected + offset):
            self._refuse(
                f"{operand.name}: dim {dim}", f"{expected + offset} as {owner} has it", extent
            )

    def require_rules(self, attributes: Mapping[str, float]) -> None:
        static = {name: extent for name, (_, extent) in self._dims.items() if type(extent) is int}
        # An attribute with the name of a dim is the dim's extent, unless it is 0.
        values = (
            self._dtypes | static | {n: a for n, a in attributes.items() if a or n not in static}
        )
        for rule in self._spec.rules:
            if values.keys() >= set(rule.names):
                self._require(rule, values)

    def _require(self, rule: Rule, values: Mapping[str, Any]) -> None:
        expected = rule.fault(*(values[name] for name in rule.names))
        if expected:
            value = values[rule.subject.rpartition(" ")[2]]
            self._refuse(rule.subject, expected, rule.got or _shown(value))

    def _refuse(self, subject: str, expected: object, got: object) -> NoReturn:
        raise KernelError(f"{self._spec.name}: {subject}: expected {expected}, got {got}")


def _shown(value: object) -> str:
    return "none" if value is None else f"{value:g}" if isinstance(value, float) else str(value)
