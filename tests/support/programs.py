"""Exported decoders with their cache ops fused, and the inputs of a step to run them with."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Mapping
from hashlib import sha256
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.export import ExportedProgram

from kvgraph.compiler.cache import plan_cache
from kvgraph.compiler.export import export
from kvgraph.compiler.frontends import huggingface
from kvgraph.compiler.functional import without_writes
from kvgraph.compiler.model import Model
from kvgraph.compiler.passes import PassReport
from kvgraph.compiler.passes.fuse_update_and_attend import fuse_update_and_attend
from kvgraph.compiler.weights import Weights
from kvgraph.contract.devices import virtual_devices
from kvgraph.contract.params import KVCacheParams
from kvgraph.contract.signature import GraphSignature

PAGE, SLOTS = 16, 7
STEPS: tuple[list[int], ...] = ([5, 1, 20], [1], [17, 3])

_exported: dict[tuple[str, str, bool], tuple[ExportedProgram, GraphSignature]] = {}


def program_of(
    folder: Path, dtype: str, *, weightless: bool = False
) -> tuple[ExportedProgram, GraphSignature]:
    """A copy of one's own: each checkpoint is exported once, whatever folder it is in."""
    files = (folder / "config.json", folder / "model.safetensors")
    digest = sha256(b"".join(path.read_bytes() for path in files)).hexdigest()
    key = digest, dtype, weightless
    if key not in _exported:
        _exported[key] = _export(folder, dtype, weightless)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch, about the copies of its own trees
        return copy.deepcopy(_exported[key])


def _export(folder: Path, dtype: str, weightless: bool) -> tuple[ExportedProgram, GraphSignature]:
    model = huggingface.load(folder, dtype, weightless=weightless)
    plan = plan_cache(
        model.layers,
        dtype=dtype,
        quantization=None,
        page_size=PAGE,
        devices=virtual_devices("cpu"),
    )
    model.place(plan)
    signature = GraphSignature.of(plan.params.get_symbolic_inputs()[0], model.vocab_size)
    program = without_writes(export(model, signature, return_buffers=False))
    fuse_update_and_attend(program.graph)
    return program, signature


def own_program(
    params: KVCacheParams, module: nn.Module, positions: int = 512
) -> tuple[ExportedProgram, GraphSignature]:
    """A user's module with a vocabulary of 160 tokens."""
    signature = GraphSignature.of(params.get_symbolic_inputs()[0], 160)
    model = Model(module, "own", (), vocab_size=160, max_seq_len=positions, dtype="float32")
    program = without_writes(export(model, signature, return_buffers=False))
    fuse_update_and_attend(program.graph)
    return program, signature


def step(signature: GraphSignature, dtype: str, lengths: list[int]) -> list[torch.Tensor]:
    """Inputs of one ragged step over empty rows; what no row owns is NaN."""
    random = np.random.default_rng(3)
    total, rows = sum(lengths), len(lengths)
    values = {
        "tokens": random.integers(3, 160, total),
        "input_row_offsets": np.cumsum([0, *lengths]),
        "logits_indices": np.arange(total),
        "cache_lengths": np.zeros(rows, int),
        "lookup_table": np.array([[3, 0], [1, 5], [2, 4]])[:rows],
        "max_lengths": np.array([[max(lengths)] * 2]),
    }
    tensors = []
    for symbol in signature.inputs:
        if symbol.kind == "buffer":
            shape = [d if isinstance(d, int) else SLOTS for d in symbol.shape]
            tensors.append(torch.full(shape, torch.nan, dtype=getattr(torch, dtype)))
        else:
            given = values[symbol.name.rpartition(".")[2]]
            tensors.append(torch.from_numpy(given.astype(np.int32)))
    return tensors


def packed_by(
    rewrite: Callable[..., PassReport], program: ExportedProgram, *given: object
) -> PassReport:
    """What a pass reports that makes weights later; `program` has them here."""
    weights = Weights()
    report = rewrite(program, *given, weights)
    weights.fill(program)
    return report


@torch.no_grad()
def logits(module: nn.Module, inputs: list[torch.Tensor]) -> torch.Tensor:
    result: torch.Tensor = module(*inputs)[0]
    assert not result.isnan().any()
    return result


Modules = Mapping[str, nn.Module]
"""A program's modules by dtype."""


def compare(plain: Modules, fused: Modules, signature: GraphSignature) -> None:
    """float32: equal to the program before. bfloat16: as near to that as the program before."""
    errors = {"plain": 0.0, "fused": 0.0}
    for lengths in STEPS:
        first, second = (step(signature, "float32", lengths) for _ in range(2))
        exact = logits(plain["float32"], first)
        torch.testing.assert_close(logits(fused["float32"], second), exact, rtol=0, atol=1e-5)
        for expected, written in zip(first, second, strict=True):
            torch.testing.assert_close(written, expected, rtol=0, atol=1e-5, equal_nan=True)
        for kind, modules in (("plain", plain), ("fused", fused)):
            got = logits(modules["bfloat16"], step(signature, "bfloat16", lengths))
            errors[kind] += float((got - exact).abs().mean())
    assert errors["fused"] <= 1.1 * errors["plain"], errors
