"""Exported decoders with their cache ops fused, and the inputs of a step to run them with."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

import numpy as np
import torch
from torch.export import ExportedProgram

from kvgraph.compiler.cache import plan_cache
from kvgraph.compiler.export import export
from kvgraph.compiler.frontends import huggingface
from kvgraph.compiler.functional import without_writes
from kvgraph.compiler.passes import PassReport
from kvgraph.compiler.passes.fuse_update_and_attend import fuse_update_and_attend
from kvgraph.compiler.weights import Weights
from kvgraph.contract.devices import virtual_devices
from kvgraph.contract.signature import GraphSignature

PAGE, SLOTS = 16, 7

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
