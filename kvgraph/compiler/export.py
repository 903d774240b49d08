"""Signature -> torch.export: one program for every batch, length and pool size."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator

import torch
from torch import nn
from torch.export import ExportedProgram

from kvgraph.compiler.model import Model
from kvgraph.contract.signature import GraphSignature
from kvgraph.errors import UnsupportedError


@contextlib.contextmanager
def symbolic_batch() -> Iterator[None]:
    """Keep a dim of extent 1 symbolic, and torch's own deprecation warnings quiet.

    Without it, a graph traced at batch 3 fails at batch 1 on a guard that no range shows
    (torch 2.13). Lowering the program needs the same setting.
    """
    from torch.fx.experimental import _config

    patch = _config.patch(backed_size_oblivious=True)  # type: ignore[attr-defined]
    with patch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def export(model: Model, signature: GraphSignature, *, return_buffers: bool) -> ExportedProgram:
    """Export `model` over `signature`, every symbolic dim dynamic.

    The example inputs are fake: no KV memory is allocated, whatever the pool's size. With
    `return_buffers` the mutated buffers are outputs behind the logits (functional backends).
    UnsupportedError: torch.export cannot trace the model with dynamic dims.
    """
    buffers = [i for i, s in enumerate(signature.inputs) if s.kind == "buffer"]
    examples, shapes = signature.to_torch_export()
    with (
        _positional(model.module, buffers if return_buffers else []),
        symbolic_batch(),
        torch.no_grad(),
    ):
        try:
            program = torch.export.export(
                model.module, examples, dynamic_shapes=(shapes,), strict=False
            )
        except Exception as error:
            lines = (str(error).strip() or type(error).__name__).splitlines()
            raise UnsupportedError(
                f"architecture {model.architecture!r}: torch.export cannot trace it with dynamic "
                f"rows and tokens: {lines[0]}"
            ) from error
    _require_logits(program, signature)
    return program


def _require_logits(program: ExportedProgram, signature: GraphSignature) -> None:
    """UnsupportedError unless the module returns what the signature says of logits."""
    results = program.graph.output_node().args[0]
    value = results[0].meta["val"]
    logits = signature.outputs[0]
    dtype, shape = str(value.dtype).removeprefix("torch."), list(value.shape)
    if dtype != logits.dtype or len(shape) != 2 or shape[1] != logits.shape[1]:
        raise UnsupportedError(
            f"logits: expected {logits.dtype} {list(logits.shape)} from the signature, "
            f"got {dtype} {shape} from the module"
        )


@contextlib.contextmanager
def _positional(module: nn.Module, returned: list[int]) -> Iterator[None]:
    """`module.forward` over positional inputs, which also returns the inputs at `returned`.

    The module is not wrapped, so parameters keep its own names.
    """
    forward = module.forward

    def positional(*inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (forward(*inputs), *(inputs[i] for i in returned))

    module.forward = positional
    try:
        yield
    finally:
        module.forward = forward
