"""A checkpoint described by the model that transformers builds of its configuration."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import nn
from transformers.pytorch_utils import Conv1D

from kvgraph.compiler.described import Described, Experts, Linear
from kvgraph.compiler.frontends import huggingface
from kvgraph.compiler.frontends.decoder import Decoder
from kvgraph.compiler.frontends.ranks import cut
from kvgraph.compiler.model import Model

FREQUENCIES = "inv_freq"
"""How the name of a rotary embedding's frequencies ends in transformers."""
ACTIVE = ("num_experts_per_tok", "num_experts_per_token", "top_k_experts", "moe_topk", "moe_k")
"""Names of how many experts a token takes."""


def describe(folder: Path, dtype: str, ranks: int = 1) -> Described:
    """From config.json alone; no weight is read. Of several ranks: the weights of one.

    Raises as `huggingface.describe` does, and `cut`.
    """
    model = huggingface.describe(folder, dtype)
    module = _of_rank(model, dtype, ranks) if ranks > 1 else model.module
    modules = list(module.modules())
    layers = [module for module in modules if isinstance(module, nn.Linear)]
    tables = {module.weight for module in modules if isinstance(module, nn.Embedding)}
    mixtures = [module for module in modules if _has_kernel(module)]
    rows, hidden = _table(model.module).weight.shape
    made = sorted(
        _linear(
            layer,
            is_tied=layer.weight in tables,
            is_head=rows in (len(layer.weight), len(layer.weight) * ranks),
        )
        for layer in layers
    )
    widths = [each.out_features for each in made if not each.is_head]
    widths += [max(module.weight.shape) for module in modules if isinstance(module, Conv1D)]
    counted = tables | {p for layer in [*layers, *mixtures] for p in layer.parameters()}
    return Described(
        architecture=model.architecture,
        layers=model.layers,
        max_seq_len=model.max_seq_len,
        hidden_size=hidden,
        vocab_size=rows,
        widest=max([hidden, *widths]),
        linears=tuple(made),
        table_elements=sum(table.numel() for table in tables),
        other_elements=sum(p.numel() for p in set(module.parameters()) - counted),
        rotary_dims=tuple(dim for module in modules for dim in _rotary_dims(module)),
        experts=tuple(map(_experts, mixtures)),
    )


def _table(module: nn.Module) -> nn.Embedding:
    table: nn.Embedding = module.get_input_embeddings()  # type: ignore[operator]
    return table


def _of_rank(model: huggingface.Description, dtype: str, ranks: int) -> nn.Module:
    """The part of rank 0."""
    decoder = Decoder(model.module)
    whole = Model(decoder, model.architecture, model.layers, 1, model.max_seq_len, dtype)
    with next(decoder.parameters()).fake_mode:  # type: ignore[attr-defined]
        own: nn.Module = cut(whole, ranks, 0).module.model  # type: ignore[assignment]
    return own


def _has_kernel(module: nn.Module) -> bool:
    """Whether it is experts by transformers' interface that `pack_experts` knows."""
    has_gate = getattr(module, "has_gate", False)
    return has_gate and not getattr(module, "has_post_expert_norm", False)


def _experts(module: Any) -> Experts:
    held, *sizes = module.down_proj.shape
    inner, width = sizes if module.is_transposed else sizes[::-1]
    count = len(module.own_experts) if hasattr(module, "own_experts") else held
    active = _active(module.config) or count
    return Experts(count, active, width, inner, module.has_bias, count // held)


def _active(config: object) -> int | None:
    """Experts of a token, by the name that its family has for it."""
    found = (getattr(config, name, None) for name in ACTIVE)
    return next((number for number in found if isinstance(number, int)), None)


def _linear(layer: nn.Linear, *, is_tied: bool, is_head: bool) -> Linear:
    rows, columns = layer.weight.shape  # of a rank's part
    return Linear(rows, columns, layer.bias is not None, is_tied, is_head)


def _rotary_dims(embedding: nn.Module) -> Iterator[int]:
    """Of each set of frequencies that a module holds."""
    for name, frequencies in embedding.named_buffers(recurse=False):
        layer_type = name.removesuffix(FREQUENCIES).removesuffix("_")
        is_original = layer_type.endswith("original")
        if name.endswith(FREQUENCIES) and not is_original:
            yield 2 * frequencies.numel()
