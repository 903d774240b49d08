"""Exported decoders with their cache ops fused, and the inputs of a step to run them with."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.export import ExportedProgram

from kvgraph import ops
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
HEAD, HEADS, KV_HEADS = 8, 4, 2
"""Of a OneLayer."""
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


class OneLayer(nn.Module):
    """A user's module: one layer of attention between an embedding and its transpose."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(160, 32)
        self.qkv = nn.Linear(32, (HEADS + 2 * KV_HEADS) * HEAD)

    def prepared(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, offsets: Any, lengths: Any
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q, k and v as the cache ops get them."""
        return q, k, v

    def forward(
        self, tokens: Any, offsets: Any, logits_indices: Any, pool: Any, *index: Any
    ) -> torch.Tensor:
        lengths, table, most = index
        x = self.embed(tokens)
        q, k, v = self.qkv(x).view(x.shape[0], -1, HEAD).split((HEADS, KV_HEADS, KV_HEADS), dim=1)
        q, k, v = self.prepared(q, k, v, offsets, lengths)
        ops.store_kv(pool, k, v, offsets, lengths, table, layer=0)
        out = ops.paged_attention(q, pool, offsets, lengths, table, most, layer=0, scale=0.3)
        return (x + out.reshape(x.shape[0], -1))[logits_indices.long()] @ self.embed.weight.T


def own_program(module: nn.Module) -> tuple[ExportedProgram, GraphSignature]:
    """The program of a OneLayer."""
    params = KVCacheParams("float32", KV_HEADS, HEAD, 1, page_size=PAGE)
    signature = GraphSignature.of(params.get_symbolic_inputs()[0], 160)
    model = Model(module, "own", (), vocab_size=160, max_seq_len=512, dtype="float32")
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
