"""Describe a checkpoint by the model that transformers builds of its configuration."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from kvgraph.compiler.checkpoint_files import indexed, shard_paths, stored_tensors
from kvgraph.compiler.described import Experts, Linear, ModelSizes
from kvgraph.compiler.frontends import huggingface
from kvgraph.compiler.frontends.decoder import Decoder
from kvgraph.compiler.frontends.folder import Config, quantization
from kvgraph.compiler.frontends.ranks import cut
from kvgraph.compiler.frontends.routing import active_experts
from kvgraph.compiler.model import Model
from kvgraph.compiler.quantized import weights_of
from kvgraph.compiler.values import Plain

FREQUENCIES = "inv_freq"
"""The end of the name of a rotary embedding's frequencies in transformers."""

ROTATED_OTHERWISE = ("hunyuan_v1_dense", "hunyuan_v1_moe", "llama4_text", "nanochat")
"""Model types that rotate by complex numbers, or before a norm of q and k. fuse_rope leaves these
as they are."""
ROTATED_FURTHER = ("llama_4_scaling_beta", "mrope_section")
"""Rope parameters of models that fuse_rope leaves as they are: queries scaled by position, or
positions of several axes."""


def describe(folder: Path, dtype: str, ranks: int = 1) -> ModelSizes:
    """Describe a checkpoint from config.json alone; no weight is read.

    `ranks`: if above 1, sizes of weights are those of rank 0.
    It raises what `huggingface.describe` and `cut` raise.
    """
    model = huggingface.describe(folder, dtype)
    module = _of_rank(model, dtype, ranks) if ranks > 1 else model.module
    modules = dict(module.named_modules())
    layers = {name: each for name, each in modules.items() if isinstance(each, nn.Linear | Conv1D)}
    tables = {each.weight for each in modules.values() if isinstance(each, nn.Embedding)}
    active = active_experts(model.module.config)
    mixtures = {name: each for name, each in modules.items() if _has_kernel(each, active)}
    rows, hidden = _table(model.module).weight.shape
    head = module.get_output_embeddings()  # type: ignore[operator]
    made = sorted(
        _linear(name, layer, is_tied=layer.weight in tables, is_head=layer is head)
        for name, layer in layers.items()
    )
    widths = [each.out_features for each in made if not each.is_head]
    held = [*layers.values(), *mixtures.values()]
    counted = tables | {parameter for layer in held for parameter in layer.parameters()}
    return ModelSizes(
        architecture=model.architecture,
        layers=model.layers,
        max_seq_len=model.max_seq_len,
        most_seq_len=model.most_seq_len,
        hidden_size=hidden,
        vocab_size=rows,
        widest=max([hidden, *widths]),
        linears=tuple(made),
        table_elements=sum(table.numel() for table in tables),
        other_elements=sum(p.numel() for p in set(module.parameters()) - counted),
        rotary_dims=_rotary_dims(model.module),
        experts=tuple(_experts(name, mixture, active) for name, mixture in mixtures.items()),
        notes=tuple(dict.fromkeys(_notes(modules.values(), active))),
    )


def plain_weights(folder: Path, config: Config) -> dict[str, bool]:
    """Whether each weight of a quantised checkpoint is plain, by its name, from the files' headers.

    Empty if the files are not at hand, the checkpoint is plain, or it is a GGUF file. It raises
    what `weights_of` raises.
    """
    given, paths = quantization(config), shard_paths(folder)
    at_hand = paths and all(path.is_file() for path in paths)
    if given is None or given["quant_method"] == "gguf" or not at_hand:
        return {}
    with indexed(folder):
        found, _ = weights_of(folder, config, stored_tensors(folder))
    return {name: isinstance(each, Plain) for name, each in found.items()}


def _table(module: nn.Module) -> nn.Embedding:
    table: nn.Embedding = module.get_input_embeddings()  # type: ignore[operator]
    return table


def _of_rank(model: huggingface.Description, dtype: str, ranks: int) -> nn.Module:
    """The model cut to rank 0's part of `ranks`."""
    decoder = Decoder(model.module)
    whole = Model(decoder, model.architecture, model.layers, 1, model.max_seq_len, dtype)
    with next(decoder.parameters()).fake_mode:  # type: ignore[attr-defined]
        own: nn.Module = cut(whole, ranks, 0).module.model  # type: ignore[assignment]
    return own


def _has_kernel(module: nn.Module, active: int | None) -> bool:
    """Whether `module` is a layer of experts that `pack_experts` supports."""
    if _gets_all(module):
        return active == 1
    has_gate = getattr(module, "has_gate", False)
    return has_gate and not getattr(module, "has_post_expert_norm", False)


def _gets_all(module: nn.Module) -> bool:
    """Whether `module` is experts that each get all tokens, scaled by scores (Llama 4)."""
    weight = getattr(module, "gate_up_proj", None)
    is_stacked = isinstance(weight, nn.Parameter) and weight.dim() == 3
    return is_stacked and len(signature(type(module).forward).parameters) == 2  # with self


def _experts(name: str, module: Any, active: int | None) -> Experts:
    held, *sizes = module.down_proj.shape
    inner, width = sizes if getattr(module, "is_transposed", True) else sizes[::-1]
    count = len(module.own_experts) if hasattr(module, "own_experts") else held
    has_bias = getattr(module, "has_bias", False)
    return Experts(count, active or count, width, inner, has_bias, count // held, name=name)


def _notes(modules: Iterable[nn.Module], active: int | None) -> Iterator[str]:
    for module in modules:
        if _gets_all(module) and not _has_kernel(module, active):
            yield (
                f"experts: a step computes all {len(module.gate_up_proj)} of a layer for each "  # type: ignore[arg-type]
                f"token, as transformers' {type(module).__name__} does, so all parameters work on "
                "a token"
            )


def _linear(name: str, layer: nn.Linear | Conv1D, *, is_tied: bool, is_head: bool) -> Linear:
    rows, columns = layer.weight.shape  # out_features and in_features are those of the whole
    if isinstance(layer, Conv1D):
        rows, columns = columns, rows
    return Linear(rows, columns, layer.bias is not None, is_tied, is_head, name=name)


def _rotary_dims(model: nn.Module) -> tuple[int, ...]:
    """Dims of each table that fuse_rope makes; equal frequencies share one table."""
    if not _has_tables(model.config):
        return ()
    found = {
        (tuple(frequencies.tolist()), scale): 2 * frequencies.numel()
        for module in model.modules()
        for frequencies, scale in _frequencies(module)
    }
    return tuple(found.values())


def _has_tables(config: object) -> bool:
    """Whether fuse_rope applies: a head's first elements are rotated, directly before attention."""
    parameters = getattr(config, "rope_parameters", None) or {}
    is_latent = bool(getattr(config, "kv_lora_rank", None))  # MLA: a head's last elements
    return (
        not is_latent
        and getattr(config, "model_type", "") not in ROTATED_OTHERWISE
        and not any(parameters.get(name) for name in ROTATED_FURTHER)
    )


def _frequencies(embedding: nn.Module) -> Iterator[tuple[torch.Tensor, float]]:
    """The rotary frequencies that a module holds, each with the scale of its cosines and sines."""
    for name, frequencies in embedding.named_buffers(recurse=False):
        prefix = name.removesuffix(FREQUENCIES)
        is_original = prefix.removesuffix("_").endswith("original")
        if name.endswith(FREQUENCIES) and not is_original:
            yield frequencies, getattr(embedding, f"{prefix}attention_scaling", 1.0)
