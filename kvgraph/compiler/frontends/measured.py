"""A checkpoint described by the model that transformers builds of its configuration."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from torch import nn

from kvgraph.compiler.described import Described, Linear
from kvgraph.compiler.frontends import huggingface

FREQUENCIES = "inv_freq"
"""How the name of a rotary embedding's frequencies ends in transformers."""
OF_LENGTH = ("dynamic", "longrope")
"""Rotary embeddings that depend on a step's length: no table by position holds them."""


def describe(folder: Path, dtype: str) -> Described:
    """From config.json alone; no weight is read. Raises as `huggingface.describe` does."""
    model = huggingface.describe(folder, dtype)
    modules = list(model.module.modules())
    layers = [module for module in modules if isinstance(module, nn.Linear)]
    tables = {module.weight for module in modules if isinstance(module, nn.Embedding)}
    counted = tables | {parameter for layer in layers for parameter in layer.parameters()}
    return Described(
        architecture=model.architecture,
        layers=model.layers,
        max_seq_len=model.max_seq_len,
        linears=tuple(sorted(_linear(layer, layer.weight in tables) for layer in layers)),
        table_elements=sum(table.numel() for table in tables),
        other_elements=sum(p.numel() for p in set(model.module.parameters()) - counted),
        rotary_dims=tuple(dim for module in modules for dim in _rotary_dims(module)),
    )


def _linear(layer: nn.Linear, is_tied: bool) -> Linear:
    return Linear(layer.out_features, layer.in_features, layer.bias is not None, is_tied)


def _rotary_dims(embedding: nn.Module) -> Iterator[int]:
    """Of each set of frequencies that a module holds and a table by position can."""
    kinds = getattr(embedding, "rope_type", None)
    for name, frequencies in embedding.named_buffers(recurse=False):
        layer_type = name.removesuffix(FREQUENCIES).removesuffix("_")
        kind = kinds.get(layer_type) if isinstance(kinds, dict) else kinds
        is_original = layer_type.endswith("original")
        if name.endswith(FREQUENCIES) and not is_original and kind not in OF_LENGTH:
            yield 2 * frequencies.numel()
