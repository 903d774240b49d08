"""Reduce a large model to a small one for the check: one layer of each kind, the same weights.

Layers are of one kind if their parameters have equal names and shapes, and their caches and layer
types are alike. If the checkpoint stores a parameter of a kind in several forms, a layer of each
form is kept. A large vocabulary keeps its first tokens, and their rows of embedding and head.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from kvgraph.compiler.cache import LayerNeed
from kvgraph.compiler.checkpoint import Checkpoint
from kvgraph.compiler.frontends.decoder import Decoder
from kvgraph.compiler.model import Model
from kvgraph.compiler.values import Head, Values

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

MOST_VOCABULARY = 4096


def parameter_bytes(model: Model) -> int:
    """Bytes of all parameters; a shared parameter counts once."""
    return sum(p.numel() * p.element_size() for p in model.module.parameters())


def may_route(model: Model) -> bool:
    """Whether the model may have a router: a decoder with parameters of three or more dims, as
    weights that are stacked by expert have, or any module of a user's own."""
    return model.is_own or any(p.dim() > 2 for p in model.module.parameters())


def reduced(model: Model) -> tuple[Model, list[int]] | None:
    """The small model, and the indices of the layers that it keeps.

    None if the model's list of layers is not found. The parts of `model` are changed and reused, so
    `model` is not usable afterwards.
    """
    decoder = model.module
    assert isinstance(decoder, Decoder)
    stored = {id(p): name for name, p in decoder.named_parameters(remove_duplicate=False)}
    layers = decoder_layers(decoder.model, len(model.layers))
    if layers is None:
        return None
    config: Any = decoder.model.config
    text = config.get_text_config()
    values = model.checkpoint.values if model.checkpoint else {}
    forms = {i: _form(values[name]) for i, name in stored.items() if name in values}
    chosen = _one_of_each_kind(layers, model.layers, getattr(text, "layer_types", None), forms)
    _keep_layers(layers, chosen, text)
    vocabulary = _cut_vocabulary(decoder.model, text, stored)
    small = replace(
        model,
        layers=tuple(model.layers[i] for i in chosen),
        vocab_size=vocabulary,
        checkpoint=None,
        files={},
    )
    if model.checkpoint is None:
        return small, chosen
    named = dict(decoder.named_parameters(remove_duplicate=False))
    cut = {name: Head(values[stored[id(p)]], len(p)) for name, p in named.items()}
    return replace(small, checkpoint=Checkpoint(cut)), chosen


def decoder_layers(model: nn.Module, count: int) -> nn.ModuleList | None:
    """The module list that holds the model's `count` layers; None if there is none.

    It is the list with `count` entries in which the parts of entry i have `layer_idx` i.
    """
    for part in model.modules():
        if isinstance(part, nn.ModuleList) and len(part) == count:
            indices = [{p.layer_idx for p in _indexed(layer)} for layer in part]
            if indices == [{i} for i in range(count)]:
                return part
    return None


def _indexed(layer: nn.Module) -> list[Any]:
    return [part for part in layer.modules() if isinstance(getattr(part, "layer_idx", None), int)]


def _form(values: Values) -> object:
    """How the checkpoint stores a tensor: this and its shape decide how it is packed."""
    return values.form, values.bits, values.stored_bits, values.x_bits


def _one_of_each_kind(
    layers: nn.ModuleList,
    needs: tuple[LayerNeed, ...],
    types: list[str] | None,
    forms: Mapping[int, object],
) -> list[int]:
    """Indices of layers that have all kinds, and in each kind all forms of each parameter.

    `forms`: stored forms by the ids of parameters.
    """
    chosen: set[int] = set()
    seen: set[object] = set()
    for i, layer in enumerate(layers):
        named = list(layer.named_parameters())
        kind = needs[i], tuple((n, tuple(p.shape)) for n, p in named), types[i] if types else ""
        own = {(kind, ""), *((kind, n, forms.get(id(p))) for n, p in named)}
        if not own <= seen:
            chosen.add(i)
            seen |= own
    return sorted(chosen | {read for i in chosen if (read := needs[i].reads) is not None})


def _keep_layers(layers: nn.ModuleList, chosen: list[int], text: PretrainedConfig) -> None:
    kept = [layers[i] for i in chosen]
    for index, layer in enumerate(kept):
        for part in _indexed(layer):
            part.layer_idx = index
    del layers[:]
    layers.extend(kept)
    types = getattr(text, "layer_types", None)
    if types:
        text.layer_types = [types[i] for i in chosen]


def _cut_vocabulary(model: PreTrainedModel, text: PretrainedConfig, stored: dict[int, str]) -> int:
    """Cut embedding and head to their first MOST_VOCABULARY rows; return the new vocabulary size.

    `stored` (names of parameters by their id) gets the cut parameters. Nothing is cut if the
    vocabulary is small, or if one of the tables is no plain embedding or linear layer.
    """
    whole: int = text.vocab_size
    tables = [model.get_input_embeddings(), model.get_output_embeddings()]
    plain = [
        isinstance(table, nn.Embedding | nn.Linear) and table.weight.shape[0] == whole
        for table in tables
    ]
    if whole <= MOST_VOCABULARY or not all(plain):
        return whole
    cut: dict[int, nn.Parameter] = {}
    for table in tables:
        for name, full in list(table._parameters.items()):
            if full is not None:
                rows = cut.setdefault(id(full), _first_rows(full))
                stored[id(rows)] = stored[id(full)]
                table._parameters[name] = rows
        if isinstance(table, nn.Embedding) and (table.padding_idx or 0) >= MOST_VOCABULARY:
            table.padding_idx = None
    text.vocab_size = MOST_VOCABULARY
    return MOST_VOCABULARY


def _first_rows(full: torch.Tensor) -> nn.Parameter:
    return nn.Parameter(full.detach()[:MOST_VOCABULARY], requires_grad=False)
