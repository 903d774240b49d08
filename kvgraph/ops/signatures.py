"""Signature and docstring of an op's torch form, from its OpSpec."""

from __future__ import annotations

from collections.abc import Iterator
from inspect import Parameter, Signature
from types import GenericAlias

from kvgraph.ops.spec import Attribute, Operand, OpSpec

ATTRIBUTE_TYPES = {"int": int, "float": float}


def signature_of(spec: OpSpec, tensor: type) -> Signature:
    """Signature with operands by position or name, and attributes by name. `tensor`: class of
    operands."""
    return Signature([*_parameters(spec, tensor)], return_annotation=_returned(spec, tensor))


def _parameters(spec: OpSpec, tensor: type) -> Iterator[Parameter]:
    for operand in spec.inputs:
        yield Parameter(
            operand.name,
            Parameter.POSITIONAL_OR_KEYWORD,
            default=None if operand.optional else Parameter.empty,
            annotation=tensor | None if operand.optional else tensor,
        )
    for attribute in spec.attributes:
        yield Parameter(
            attribute.name,
            Parameter.KEYWORD_ONLY,
            default=Parameter.empty if attribute.default is None else attribute.default,
            annotation=ATTRIBUTE_TYPES[attribute.kind],
        )


def _returned(spec: OpSpec, tensor: type) -> object:
    count = len(spec.results)
    several = GenericAlias(tuple, (tensor,) * count)
    return tensor if count == 1 else several if count else None


def docstring(spec: OpSpec) -> str:
    """Docstring of the op: its `doc`, dims and dtypes of operands, written inputs, attributes."""
    lines = [spec.doc, "", "Inputs:"]
    lines += [f"- {_operand(o, writes=o.name in spec.mutated)}" for o in spec.inputs]
    if spec.results:
        lines += ["", "Returns:", *(f"- {_operand(result)}" for result in spec.results)]
    lines += ["", "Attributes:", *(f"- {_attribute(a)}" for a in spec.attributes)]
    return "\n".join(lines)


def _operand(operand: Operand, *, writes: bool = False) -> str:
    notes = (", optional" if operand.optional else "") + (", written in place" if writes else "")
    dims = ", ".join(map(str, operand.dims))
    return f"`{operand.name}` [{dims}] {' or '.join(operand.dtypes)}{notes}"


def _attribute(attribute: Attribute) -> str:
    default = "" if attribute.default is None else f", default {attribute.default}"
    return f"`{attribute.name}` {attribute.kind}{default}"
