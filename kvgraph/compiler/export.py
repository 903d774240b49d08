"""Export a model with torch.export: one program for every batch, length and pool size.

Decision: a module is exported with torch's own settings first. They take ordinary module code
(`.contiguous()` on a slice), but may decide that a dim is not 1. The guards of such a program say
so, and it is exported again with `symbolic_batch`. That keeps the dim open for torch's own code,
and takes one branch of a module's `x.shape[0] > 1` without a guard. If the second export fails (a
module that has both), the first program is taken without its guards, provided that a step of one
token gives the module's logits. `require_one_token` tests this for every user's own module.
"""

from __future__ import annotations

import contextlib
import io
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from types import FunctionType

import torch
from torch import nn
from torch._higher_order_ops.auto_functionalize import auto_functionalized_v2
from torch._ops import HigherOrderOperator, OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.export import ExportedProgram
from torch.fx import Node
from torch.overrides import TorchFunctionMode

from kvgraph.compiler.interpret import ProgramRun
from kvgraph.compiler.model import Model
from kvgraph.compiler.passes.parameters import inputs_of
from kvgraph.compiler.passes.writes import base_of, written_by
from kvgraph.compiler.quiet import quiet_loggers, quiet_warnings
from kvgraph.compiler.streamed import streamed_of
from kvgraph.compiler.trace_errors import call_refused, refusal, require_taken
from kvgraph.compiler.weights import Weights
from kvgraph.contract.dims import NUM_PAGE_SLOTS, NUM_SLOTS
from kvgraph.contract.signature import GraphSignature
from kvgraph.errors import KernelError, KVGraphError, UnsupportedError
from kvgraph.ops import torch_ops
from kvgraph.progress import task
from kvgraph.signal_handlers import reraise_if_signalled

NAMES = {
    "wrap_with_autocast": "torch.autocast",
    "cond": "torch.cond",
    "torch._functorch.predispatch": "torch.vmap or another transform of torch.func",
}
"""Public names for operators that torch names otherwise, for error messages."""

NUMBERS = (int, float, torch.SymInt, torch.SymFloat, torch.SymBool)
"""Types of values that are computed from sizes."""

REPORTING = ("torch.fx.experimental.symbolic_shapes", "torch._subclasses.fake_tensor")


@contextlib.contextmanager
def symbolic_batch() -> Iterator[None]:
    """Keep a dim of extent 1 symbolic, and torch's own deprecation warnings quiet.

    Without it, a program that was traced at batch 3 may fail at batch 1 (torch 2.13).
    """
    from torch.fx.experimental import _config

    patch = _config.patch(backed_size_oblivious=True)  # type: ignore[attr-defined]
    with patch, quiet_warnings():
        yield


@contextlib.contextmanager
def stack_traces(wanted: bool) -> Iterator[None]:
    """Set whether new nodes record the source lines that called them. Recording takes a quarter of
    the time of a trace."""
    from torch.fx import config

    before = config.do_not_emit_stack_traces
    config.do_not_emit_stack_traces = not wanted
    try:
        yield
    finally:
        config.do_not_emit_stack_traces = before


@contextlib.contextmanager
def lowering() -> Iterator[None]:
    """Settings for lowering a program: `symbolic_batch`, and no stack traces for new nodes."""
    with symbolic_batch(), stack_traces(False):
        yield


def export(model: Model, signature: GraphSignature, *, return_buffers: bool) -> ExportedProgram:
    """Export `model` over `signature`, every symbolic dim dynamic and at least 1.

    The example inputs are fake: no KV memory is allocated, whatever the pool's size. With
    `return_buffers` the mutated buffers are outputs after the logits (functional backends).
    Logits in another floating type become float32.
    UnsupportedError: torch.export cannot trace the model with dynamic dims. The message has the
    line of the module at which it failed.
    """
    buffers = [i for i, s in enumerate(signature.inputs) if s.kind == "buffer"]
    returned = buffers if return_buffers else []
    with _positional(model.module, signature, returned), torch.no_grad():
        program = _trace(model, signature)
    _require_operators(model, program)
    _require_logits(program, signature)
    return program


def _trace(model: Model, signature: GraphSignature) -> ExportedProgram:
    """Export as the decision above says. UnsupportedError if no program fits all extents."""
    refused: list[Exception] = []
    guarded: list[ExportedProgram] = []
    for settings in (quiet_warnings, symbolic_batch):
        with settings(), task("tracing", len(model.layers), "layers"):
            try:
                program = _export(model.module, signature)
            except KernelError as error:
                raise call_refused(model, error) from error
            except KVGraphError:
                raise
            except Exception as error:
                reraise_if_signalled(error)
                refused.append(error)
                continue
        if _admits_ones(program, signature):
            return program
        guarded.append(program)
    if guarded and _at_ones(guarded[0], model, signature):
        guarded[0]._guards_code = []
        return guarded[0]
    raise refusal(model, refused, lambda: _export(model.module, signature))


def _export(module: nn.Module, signature: GraphSignature) -> ExportedProgram:
    examples, shapes = signature.to_torch_export()
    reports = contextlib.redirect_stderr(io.StringIO())  # torch prints when a trace fails
    with _restored(module), _without_gradients(module), quiet_loggers(*REPORTING), reports:
        return torch.export.export(module, examples, dynamic_shapes=(shapes,), strict=False)


@contextlib.contextmanager
def _restored(module: nn.Module) -> Iterator[None]:
    """Restore attributes, buffers and containers of `module` after a trace with fake values."""
    before = [(part, dict(vars(part)), dict(part._buffers)) for part in module.modules()]
    held = [
        (value, type(value)(value))
        for _, attributes, _ in before
        for value in attributes.values()
        if type(value) in (list, dict, set, deque)
    ]
    try:
        yield
    finally:
        for part, attributes, buffers in before:
            vars(part).clear()
            vars(part).update(attributes)
            part._buffers.clear()
            part._buffers.update(buffers)
        for value, kept in held:
            value.clear()
            value.extend(kept) if isinstance(value, list | deque) else value.update(kept)


@contextlib.contextmanager
def _without_gradients(module: nn.Module) -> Iterator[None]:
    """Clear `requires_grad` of parameters that were made in torch.inference_mode: a trace would set
    it on copies of them, which torch refuses."""
    asking = [each for each in module.parameters() if each.is_inference() and each.requires_grad]
    for parameter in asking:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        with torch.inference_mode():
            for parameter in asking:
                parameter.requires_grad_(True)


def _admits_ones(program: ExportedProgram, signature: GraphSignature) -> bool:
    """Whether no guard of the program rules out a batch of one row with one token."""
    inputs = [torch.empty(s.extents(_ones(signature)), device="meta") for s in signature.inputs]
    scope = {"L": {"inputs": inputs}, "torch": torch}
    return all(eval(guard, scope) for guard in program._guards_code)


def require_one_token(model: Model, program: ExportedProgram, signature: GraphSignature) -> None:
    """Raise UnsupportedError if `program` and its module differ on a step of one token.

    `model`: a user's own module that changes nothing but the cache. A trace takes one branch of
    `if x.shape[0] > 1`, and steps of one token would take that branch too.
    """
    if _at_ones(program, model, signature) is False:
        raise refusal(model, [], lambda: _export(model.module, signature))


def _at_ones(program: ExportedProgram, model: Model, signature: GraphSignature) -> bool | None:
    """Whether program and module give the same logits for one token of one row.

    None: one of them fails on one token, or the module has no values to compare with.
    """
    streamed = streamed_of(model)
    if streamed is None and any(
        isinstance(value, FakeTensor) for value in model.module.state_dict().values()
    ):
        return None
    run = ProgramRun(program, weights=Weights(model.checkpoint))
    inputs = partial(_one_token, signature, model.vocab_size // 2)
    values = streamed.within(model.module) if streamed else contextlib.nullcontext()
    try:
        with values, torch.no_grad():
            found, expected = run(*inputs())[0], model.module(*inputs())
    except Exception as error:
        reraise_if_signalled(error)
        return None
    logits = expected[0] if isinstance(expected, tuple) else expected
    is_alike = found.shape == logits.shape
    return is_alike and torch.allclose(found, logits.float(), rtol=1e-3, atol=1e-5, equal_nan=True)


def _one_token(signature: GraphSignature, token: int) -> list[torch.Tensor]:
    """Inputs of a step of one token over an empty cache. Fields that are not set here are zeros."""
    values = {"tokens": [token], "input_row_offsets": [0, 1], "max_lengths": [[1, 1]]}
    made = []
    for symbol in signature.inputs:
        dtype = getattr(torch, symbol.dtype)
        zeros = torch.zeros(symbol.extents(_ones(signature)), dtype=dtype)
        given = values.get(symbol.name.rpartition(".")[2])
        made.append(zeros if given is None else torch.tensor(given, dtype=dtype))
    return made


def _ones(signature: GraphSignature) -> dict[str, int]:
    """Extents by dim: 1 for each, but 2 pages for a pool, because the last one is the null page."""
    dims = {dim for symbol in signature.inputs for dim in symbol.symbolic_dims}
    return {dim: 2 if dim.endswith((NUM_PAGE_SLOTS, NUM_SLOTS)) else 1 for dim in dims}


def _require_operators(model: Model, program: ExportedProgram) -> None:
    """Raise UnsupportedError for random numbers, and for higher-order operators such as torch.cond.

    Passes and backends expect operators that run one after the other.
    """
    for node in program.graph.nodes:
        if _draws(node):
            raise UnsupportedError(
                f"architecture {model.architecture!r}: expected a model that draws no random "
                f"numbers, got {node.target}; compute without it"
            )
        if (name := _part(node)) is not None:
            raise UnsupportedError(
                f"architecture {model.architecture!r}: expected operators that run one after the "
                f"other, got {name}; compute without it"
            )


def _part(node: Node) -> str | None:
    """The name of an operator with its own graph, or of a function that torch.func inserts; None if
    `node` calls another operator, or computes with sizes."""
    target = node.target
    if isinstance(target, HigherOrderOperator):
        is_write = target is auto_functionalized_v2  # without one in place
        return None if is_write else NAMES.get(str(target), str(target))
    if not isinstance(target, FunctionType) or isinstance(node.meta.get("val"), NUMBERS):
        return None
    return NAMES.get(target.__module__, target.__name__)


def _draws(node: Node) -> bool:
    """Whether `node` draws random numbers. A dropout that is off or has p = 0 does not."""
    target = node.target
    if not isinstance(target, OpOverload) or torch.Tag.nondeterministic_seeded not in target.tags:
        return False
    arguments = target._schema.arguments
    given = {each.name: each.default_value for each in arguments}
    given |= {each.name: value for each, value in zip(arguments, node.args, strict=False)}
    given |= node.kwargs
    is_on = given.get("train", given.get("training", True))
    return is_on is not False and given.get("dropout_p", given.get("p", 1)) != 0


def _require_logits(program: ExportedProgram, signature: GraphSignature) -> None:
    """Raise UnsupportedError unless logits have the signature's dtype and shape."""
    results = program.graph.output_node().args[0]
    value = results[0].meta["val"]
    logits = signature.outputs[0]
    dims = {
        str(extent): dim
        for node, symbol in inputs_of(program, signature).items()
        for extent, dim in zip(node.meta["val"].shape, symbol.shape, strict=True)
        if isinstance(dim, str)
    }
    dtype = str(value.dtype).removeprefix("torch.")
    shape = [dims.get(str(extent), extent) for extent in value.shape]
    if dtype != logits.dtype or shape != list(logits.shape):
        raise UnsupportedError(
            f"logits: expected {logits.dtype} {list(logits.shape)} from the signature, "
            f"got {dtype} {shape} from the module; return a row of vocab_size logits for each "
            "of logits_indices"
        )


def require_state_unchanged(
    program: ExportedProgram, signature: GraphSignature, *, is_padded: bool
) -> None:
    """Raise UnsupportedError if the module writes into its own tensors, or into inputs without a
    cache op.

    Otherwise a step would depend on earlier steps of other requests. Plain operators may write a
    padded cache.
    """
    held = program.graph_signature
    own = {
        **held.inputs_to_buffers,
        **held.inputs_to_parameters,
        **held.inputs_to_lifted_tensor_constants,
    }
    for node, symbol in inputs_of(program, signature).items():
        if symbol.kind != "buffer" or not is_padded:
            own[node.name] = symbol.name
    _require_unwritten(program, own)


def require_constants_unchanged(program: ExportedProgram) -> None:
    """Raise UnsupportedError if the module writes into a tensor of its own that is no buffer.

    Torch decomposes no such program, so this comes before the passes.
    """
    _require_unwritten(program, program.graph_signature.inputs_to_lifted_tensor_constants)


def _require_unwritten(program: ExportedProgram, own: Mapping[str, str]) -> None:
    """Raise UnsupportedError if an operator writes into a placeholder that is a key of `own`."""
    for node in program.graph.nodes:
        if node.target is torch_ops.update_and_attend.default:
            continue
        names = [own[base.name] for base in map(base_of, written_by(node)) if base.name in own]
        if names:
            raise UnsupportedError(
                "module: expected one that changes nothing but the cache, by cache ops, got "
                f"{node.target} that changes {names[0]!r}"
            )


class _NoGradNodes(TorchFunctionMode):
    """A torch mode that ignores a module's `no_grad`: gradients are off in the whole trace.

    torch would split the graph at each such node and join it again, a tenth of an export's time.
    """

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: object,
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        return None if func is torch._C._set_grad_enabled else func(*args, **(kwargs or {}))


@contextlib.contextmanager
def _positional(
    module: nn.Module, signature: GraphSignature, returned: list[int]
) -> Iterator[None]:
    """Let `module` take the signature's inputs by position, and return the logits, followed by
    some of these inputs.

    `returned`: indices of inputs to return after the logits. Floating logits become float32.
    A hook that runs after the module's own hooks packs the result, so they see what its forward
    returns. The module is not wrapped, so parameters keep its own names.
    """
    own = vars(module).get("forward")
    forward = module.forward

    def positional(*inputs: torch.Tensor) -> object:
        require_taken(forward, inputs, signature)
        with _NoGradNodes():
            return forward(*inputs)

    def packed(
        _: nn.Module, inputs: tuple[torch.Tensor, ...], logits: object
    ) -> tuple[torch.Tensor, ...]:
        if not isinstance(logits, torch.Tensor):
            raise UnsupportedError(
                f"logits: expected one tensor from the module, got {type(logits).__name__}"
            )
        if logits.is_floating_point():
            logits = logits.float()
        return (logits, *(inputs[i] for i in returned))

    module.forward = positional
    packing = module.register_forward_hook(packed)
    try:
        yield
    finally:
        packing.remove()
        if own is None:
            del module.forward
        else:
            module.forward = own
