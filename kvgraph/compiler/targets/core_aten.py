"""Convert a program to core ATen, the operators for which the ONNX exporter has translations.

Decision: torch's own decomposition traces the whole program once more, which takes a quarter of a
compile. Most models need it for a few operators that equal one or two core ATen operators, so these
are rewritten in place. A program with any other operator is decomposed by torch.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Mapping, Set
from contextlib import nullcontext
from functools import cache

import torch
from torch._decomp import get_decompositions
from torch._guards import detect_fake_mode
from torch._ops import OperatorBase, OpOverload
from torch.export import ExportedProgram
from torch.export.graph_signature import OutputKind
from torch.fx import Node
from torch.fx.node import Argument

from kvgraph.compiler.copies import expand_copies
from kvgraph.compiler.export import lowering
from kvgraph.compiler.passes.operands import add_call, computed, value
from kvgraph.compiler.passes.parameters import name_outputs
from kvgraph.compiler.passes.writes import (
    base_of,
    functional_form,
    is_composite,
    write_elsewhere,
    writes_are_plain,
    written_by,
)

aten = torch.ops.aten

KEPT_WHOLE = ("aten::rms_norm", "aten::silu", "aten::squeeze", "aten::sym_size")
"""Operators that are not decomposed. ONNX Runtime has the first two as single nodes. torch's
exporter has no translation for the decomposition of the third. The last is a dynamic extent."""
NOT_TRANSLATED = (aten.var.correction,)
"""Core ATen operators without a translation in torch's exporter, which would decompose the whole
program once more for them."""


def to_core_aten(program: ExportedProgram) -> ExportedProgram:
    """An equivalent program in core ATen: `program`, changed in place, or a new one.

    The result's signature names the outputs that its graph returns.
    """
    with lowering():
        expand_copies(program.graph)
        is_done = _rewrite(program, _decomposed())
        name_outputs(program)
        program.graph_module.recompile()
        if is_done:
            return program
        decomposed: ExportedProgram = program.run_decompositions(_rules())
    return _without_mutation(decomposed)


def _rules() -> dict[OpOverload, Callable[..., object]]:
    """torch's own decomposition of each operator that is to be decomposed."""
    whole = torch.export.default_decompositions().items()
    return {op: rule for op, rule in whole if not _is_kept(op)} | get_decompositions(NOT_TRANSLATED)


@cache
def _decomposed() -> Set[OpOverload]:
    """Operators that have a decomposition; composite operators that are registered later are not
    among them."""
    return frozenset(_rules())


def _rewrite(program: ExportedProgram, decomposed: Set[OpOverload]) -> bool:
    """Rewrite what can be, and set missing values. Return whether no decomposition is left."""
    calls = [node for node in program.graph.nodes if node.op == "call_function"]
    is_done, is_plain = True, writes_are_plain(calls)
    given = set(program.graph_signature.user_inputs)
    for node in calls:
        if _has_own_graph(node):
            is_done = False
        elif written_by(node):
            is_done &= is_plain and _write_elsewhere(node, given)
        elif node.target in decomposed or _is_composite(node.target):
            rewrite = REWRITES.get(node.target)
            made = rewrite(node, *node.args, **node.kwargs) if rewrite else None
            if made is None:
                is_done = False
                continue
            node.replace_all_uses_with(made)
            program.graph.erase_node(node)
        elif "val" not in node.meta:  # some passes add nodes without a value
            node.meta["val"] = computed(node)
    return is_done


def _write_elsewhere(call: Node, given: Collection[object]) -> bool:
    """Replace an in-place operator by a new value, which later nodes read.

    Return False if that is not possible: its form without the write is not core ATen, or it writes
    into a buffer, or into a part of an input (`given`).
    """
    op = functional_form(call.target)
    if op is None or op in _decomposed() or _is_composite(op):
        return False
    (written,) = written_by(call)
    base = base_of(written)
    if base.op == "placeholder" and not (written is base and base.name in given):
        return False
    return write_elsewhere(call, op)


def _without_mutation(program: ExportedProgram) -> ExportedProgram:
    """Remove outputs that torch adds for mutated inputs; buffers are user outputs already."""
    specs = program.graph_signature.output_specs
    output = program.graph.output_node()
    results = output.args[0]
    assert isinstance(results, tuple)
    kept = [i for i, spec in enumerate(specs) if spec.kind is OutputKind.USER_OUTPUT]
    output.args = (tuple(results[i] for i in kept),)
    specs[:] = [specs[i] for i in kept]
    program.graph_module.recompile()
    return program


def _is_kept(op: OpOverload) -> bool:
    return op.name().partition(".")[0] in KEPT_WHOLE


def _is_composite(op: object) -> bool:
    """Whether torch decomposes `op` without a registered decomposition."""
    return isinstance(op, OpOverload) and not _is_kept(op) and is_composite(op)


def _has_own_graph(call: Node) -> bool:
    return isinstance(call.target, OperatorBase) and not isinstance(call.target, OpOverload)


def _before(call: Node, op: Callable[..., object], *args: Argument, **named: Argument) -> Node:
    """Add a node right before `call`, with its fake value.

    It is computed in the call's fake mode, because an operator without operands would otherwise
    make a real tensor with constant extents.
    """
    among = detect_fake_mode(call.meta.get("val")) or nullcontext()
    with among, call.graph.inserting_before(call):
        made = add_call(call.graph, op, *args, **named)
    made.meta = {**call.meta, "val": made.meta["val"]}
    return made


# Each adds core ATen nodes right before a call and returns the result; None: leave it to torch.


def _linear(call: Node, x: Node, weight: Node, bias: Node | None = None) -> Node | None:
    shape = value(x).shape
    if len(shape) == 2:
        return _product(call, lambda: x, weight, bias)
    tokens = _extent(call, shape[1]) if len(shape) == 3 and shape[0] == 1 else None
    if tokens is None or not value(x).is_contiguous():
        return None
    made = _product(
        call, lambda: _before(call, aten.view.default, x, [tokens, shape[2]]), weight, bias
    )
    return _before(call, aten.view.default, made, [1, tokens, value(weight).shape[0]])


def _product(call: Node, rows: Callable[[], Node], weight: Node, bias: Node | None) -> Node:
    if bias is None:
        columns = _before(call, aten.permute.default, weight, [1, 0])
        return _before(call, aten.mm.default, rows(), columns)
    flat, columns = rows(), _before(call, aten.permute.default, weight, [1, 0])
    return _before(call, aten.addmm.default, bias, flat, columns)


def _extent(call: Node, extent: object) -> Node | int | None:
    """An extent as an argument for `call`: a number, or a node that reads it from an input; None if
    no input has it."""
    if isinstance(extent, int):
        return extent
    assert isinstance(extent, torch.SymInt)
    inputs: list[Node] = call.graph.find_nodes(op="placeholder")
    for given in inputs:
        for dim, each in enumerate(getattr(given.meta.get("val"), "shape", ())):
            if isinstance(each, torch.SymInt) and each.node.expr == extent.node.expr:
                return _size(call, inputs[-1], given, dim)
    return None


def _size(call: Node, last_input: Node, given: Node, dim: int) -> Node:
    for user in given.users:
        if user.target is aten.sym_size.int and user.args == (given, dim) and user < call:
            return user
    with call.graph.inserting_after(last_input):
        return add_call(call.graph, aten.sym_size.int, given, dim)


def _layer_norm(
    call: Node,
    x: Node,
    shape: list[int],
    weight: Node | None = None,
    bias: Node | None = None,
    eps: float = 1e-5,
    *_: object,
    **__: object,
) -> Node:
    made = _before(call, aten.native_layer_norm.default, x, shape, weight, bias, eps)
    return _before(call, operator.getitem, made, 0)


def _matmul(call: Node, x: Node, y: Node) -> Node | None:
    both = value(x).dim(), value(y).dim()
    return _before(call, aten.mm.default, x, y) if both == (2, 2) else None


def _numpy_t(call: Node, x: Node) -> Node:
    return _before(call, aten.permute.default, x, list(range(value(x).dim()))[::-1])


def _chunk(call: Node, x: Node, chunks: int, dim: int = 0) -> Node | None:
    extent = value(x).shape[dim]
    return _split(call, x, -(-extent // chunks), dim) if isinstance(extent, int) else None


def _split(call: Node, x: Node, size: Argument, dim: int = 0) -> Node | None:
    extent = value(x).shape[dim]
    if not isinstance(extent, int) or not isinstance(size, int) or not size:
        return None
    sizes = [min(size, extent - start) for start in range(0, extent, size)]
    return _before(call, aten.split_with_sizes.default, x, sizes, dim)


def _transpose(call: Node, x: Node, a: int, b: int) -> Node:
    dims = list(range(value(x).dim()))
    dims[a], dims[b] = dims[b], dims[a]
    return _before(call, aten.permute.default, x, dims)


def _reshape(call: Node, x: Node, shape: list[Argument]) -> Node | None:
    return _before(call, aten.view.default, x, shape) if value(x).is_contiguous() else None


def _to(call: Node, x: Node, dtype: torch.dtype, *others: object, **named: object) -> Node | None:
    return None if others or named else _cast(call, x, dtype)


def _type_as(call: Node, x: Node, other: Node) -> Node:
    return _cast(call, x, value(other).dtype)


def _contiguous(call: Node, x: Node, **named: object) -> Node | None:
    return x if value(x).is_contiguous() and not named else None


def _concat(call: Node, parts: list[Node], dim: int = 0) -> Node:
    return _before(call, aten.cat.default, parts, dim)


def _arange(call: Node, end: Argument, **named: Argument) -> Node:
    return _before(call, aten.arange.start_step, 0, end, layout=torch.strided, **named)


def _and(call: Node, x: Node, y: Node) -> Node:
    return _before(call, aten.bitwise_and.Tensor, x, y)


def _where(call: Node, condition: Node, x: Node, other: Argument) -> Node | None:
    made = value(x)
    if value(call).dtype != made.dtype:
        return None
    kind: dict[str, Argument] = {
        "dtype": made.dtype,
        "layout": made.layout,
        "device": made.device,
    }
    scalar = _before(call, aten.scalar_tensor.default, other, **kind)
    return _before(call, aten.where.self, condition, x, scalar)


def _square(call: Node, x: Node) -> Node:
    return _before(call, aten.pow.Tensor_Scalar, x, 2)


def _softmax(call: Node, x: Node, dim: int, dtype: torch.dtype | None = None) -> Node:
    return _before(call, aten._softmax.default, _cast(call, x, dtype), dim, False)


def _cast(call: Node, x: Node, dtype: torch.dtype | None) -> Node:
    if dtype in (None, value(x).dtype):
        return x
    return _before(call, aten._to_copy.default, x, dtype=dtype)


REWRITES: Mapping[object, Callable[..., Node | None]] = {
    aten.__and__.Tensor: _and,
    aten.arange.default: _arange,
    aten.chunk.default: _chunk,
    aten.concat.default: _concat,
    aten.contiguous.default: _contiguous,
    aten.layer_norm.default: _layer_norm,
    aten.linear.default: _linear,
    aten.matmul.default: _matmul,
    aten.numpy_T.default: _numpy_t,
    aten.reshape.default: _reshape,
    aten.softmax.int: _softmax,
    aten.split.Tensor: _split,
    aten.square.default: _square,
    aten.to.dtype: _to,
    aten.transpose.int: _transpose,
    aten.type_as.default: _type_as,
    aten.where.ScalarOther: _where,
}
