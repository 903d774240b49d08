"""The ops in ONNX: schemas with shape inference, and NumPy kernels for onnx's reference evaluator.

Both are generated from the OpSpecs. The ONNX form is functional: a mutated input is also an output.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import onnx
from onnx.defs import OpSchema
from onnx.reference.op_run import OpRun

from kvgraph.contract.dtypes import DTYPES
from kvgraph.ops._collectives import ALL_GATHER, ALL_REDUCE
from kvgraph.ops._experts import EXPERTS
from kvgraph.ops._linear import LINEAR
from kvgraph.ops._route import ROUTE
from kvgraph.ops._update_and_attend import UPDATE_AND_ATTEND
from kvgraph.ops.spec import OPSET_DOMAIN, OPSET_VERSION, Operand, OpSpec
from kvgraph.ops.specs import ALL_SPECS

if TYPE_CHECKING:
    from kvgraph.contract.dims import Array

KERNEL_ATTRIBUTES = dict.fromkeys(("kernels", "images"), OpSchema.AttrType.TENSOR)
"""Optional attributes of nodes for a GPU: the record of their kernels, and their cubins."""


def register_schemas() -> None:
    """Register the ops for onnx's checker and shape inference; it may be called twice."""
    for spec in ALL_SPECS:
        if not onnx.defs.has(spec.name, OPSET_DOMAIN):
            onnx.defs.register_schema(schema(spec))


def schema(spec: OpSpec) -> OpSchema:
    """ONNX schema of `spec`; operands that share dtypes share a type variable."""
    built = OpSchema(
        spec.name,
        OPSET_DOMAIN,
        OPSET_VERSION,
        doc=spec.doc,
        inputs=[_parameter(operand) for operand in spec.inputs],
        outputs=[_parameter(operand) for operand in spec.outputs],
        type_constraints=[
            (variable, _types(dtypes), f"dtype of {', '.join(names)}")
            for variable, (dtypes, names) in _type_variables(spec).items()
        ],
        attributes=[
            *(_attribute(a.name, a.kind, a.default) for a in spec.attributes),
            *(
                OpSchema.Attribute(name, kind, required=False)
                for name, kind in KERNEL_ATTRIBUTES.items()
            ),
        ],
    )
    built.set_type_and_shape_inference_function(_inference(spec))
    return built


def translation_table() -> dict[Callable[..., object], Callable[..., object]]:
    """`custom_translation_table` of `torch.onnx.export`, from functional torch ops to ONNX nodes.

    It also registers the schemas, which the exporter needs.
    """
    from kvgraph.ops import torch_ops

    register_schemas()
    return {
        torch_ops.update_and_attend_functional.default: _translation(UPDATE_AND_ATTEND),
        torch_ops.linear.default: _translation(LINEAR),
        torch_ops.experts.default: _translation(EXPERTS),
        torch_ops.route.default: _translation(ROUTE),
        torch_ops.all_reduce.default: _translation(ALL_REDUCE),
        torch_ops.all_gather.default: _translation(ALL_GATHER),
    }


def _translation(spec: OpSpec) -> Callable[..., object]:
    from onnxscript import values

    op = getattr(values.Opset(OPSET_DOMAIN, OPSET_VERSION), spec.name)

    def translate(*inputs: object, **attributes: float) -> object:
        return op(*inputs, **attributes, _outputs=len(spec.outputs))

    return translate


def _parameter(operand: Operand) -> OpSchema.FormalParameter:
    kind = operand.type_variable or _types(operand.dtypes)[0]
    option = OpSchema.FormalParameterOption
    return OpSchema.FormalParameter(
        operand.name,
        kind,
        f"[{', '.join(map(str, operand.dims))}]",
        param_option=option.Optional if operand.optional else option.Single,
    )


def _types(dtypes: tuple[str, ...]) -> list[str]:
    kinds = onnx.TensorProto.DataType
    return [f"tensor({kinds.Name(DTYPES[name].onnx).lower()})" for name in dtypes]


def _type_variables(spec: OpSpec) -> dict[str, tuple[tuple[str, ...], list[str]]]:
    variables: dict[str, tuple[tuple[str, ...], list[str]]] = {}
    for operand in spec.inputs + spec.outputs:
        if operand.type_variable:
            entry = variables.setdefault(operand.type_variable, (operand.dtypes, []))
            entry[1].append(operand.name)
    return variables


def _attribute(name: str, kind: str, default: int | float | None) -> OpSchema.Attribute:
    if default is None:
        kinds = {"int": OpSchema.AttrType.INT, "float": OpSchema.AttrType.FLOAT}
        return OpSchema.Attribute(name, kinds[kind], required=True)
    return OpSchema.Attribute(name, onnx.helper.make_attribute(name, default))


def _inference(spec: OpSpec) -> Callable[[onnx.shape_inference.InferenceContext], None]:
    """Function that infers output types and shapes from the inputs' dims by name."""

    def infer(context: onnx.shape_inference.InferenceContext) -> None:
        types = [context.get_input_type(i) for i in range(context.get_num_inputs())]
        shapes = [None if t is None else t.tensor_type.shape.dim for t in types]
        elements = [None if t is None else int(t.tensor_type.elem_type) for t in types]
        given = {a.name: context.get_attribute(a.name) for a in spec.attributes}
        widths = {name: a.i for name, a in given.items() if a is not None and a.i}
        for index in range(context.get_num_outputs()):
            output = spec.outputs[index]
            element = spec.type_of(output, elements, lambda name: DTYPES[name].onnx)
            if element is None:
                continue
            result = onnx.TypeProto()
            result.tensor_type.elem_type = element
            shape = result.tensor_type.shape
            for extent in spec.extents(output, shapes, widths):
                dim = shape.dim.add()
                if isinstance(extent, int):
                    dim.dim_value = extent
                elif extent is not None:
                    dim.CopyFrom(extent)
            context.set_output_type(index, result)

    return infer


def reference_ops() -> list[type[OpRun]]:
    """OpRun classes for `onnx.reference.ReferenceEvaluator(..., new_ops=...)`.

    They mutate the pool in place, as the native kernels do.
    """
    return [_reference_op(spec) for spec in ALL_SPECS]


def _reference_op(spec: OpSpec) -> type[OpRun]:
    names = [operand.name for operand in spec.inputs]

    def run(self: OpRun, *inputs: Array | None, **attributes: float) -> tuple[Array, ...]:
        given = {a.name: attributes.get(a.name) for a in spec.attributes}
        given |= {a.name: a.default for a in spec.attributes if given[a.name] is None}
        values = dict.fromkeys(names) | dict(zip(names, inputs, strict=False))
        results = spec.reference(*values.values(), **given)
        new = iter(results if isinstance(results, tuple) else (results,))
        outputs = (values[o.alias] if o.alias else next(new, None) for o in spec.outputs)
        present = [np.empty(0, np.float32) if value is None else value for value in outputs]
        return tuple(present[: len(self.onnx_node.output)])

    return type(spec.name, (OpRun,), {"op_domain": OPSET_DOMAIN, "_run": run})
