"""Describe a checkpoint by the model that transformers builds of its configuration."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers.activations import SiLUActivation
from transformers.pytorch_utils import Conv1D

from kvgraph.compiler.checkpoint import Checkpoint
from kvgraph.compiler.checkpoint_files import indexed, shard_paths
from kvgraph.compiler.described import Experts, Linear, ModelSizes
from kvgraph.compiler.frontends import huggingface
from kvgraph.compiler.frontends.decoder import Decoder
from kvgraph.compiler.frontends.folder import Config, quantization
from kvgraph.compiler.frontends.ranks import cut
from kvgraph.compiler.frontends.routing import active_experts
from kvgraph.compiler.frontends.weightless import sources
from kvgraph.compiler.joined_forms import KeptAs
from kvgraph.compiler.model import Model
from kvgraph.compiler.quiet import quiet_loggers
from kvgraph.compiler.values import Values

GATES = (("gate_proj", "up_proj"), ("w1", "w3"))
"""Names of a gate and its up projection in an MLP."""
SILU = (nn.SiLU, SiLUActivation)

OF_DECODER = "model."
"""What the name of a parameter begins with in a Decoder."""

FREQUENCIES = "inv_freq"
"""The end of the name of a rotary embedding's frequencies in transformers."""

ROTATED_OTHERWISE = ("hunyuan_v1_dense", "hunyuan_v1_moe", "llama4_text", "nanochat")
"""Model types that rotate by complex numbers, or before a norm of q and k. fuse_rope leaves these
as they are."""
ROTATED_FURTHER = ("llama_4_scaling_beta", "mrope_section")
"""Rope parameters of models that fuse_rope leaves as they are: queries scaled by position, or
positions of several axes."""


def describe(model: huggingface.Description, dtype: str, ranks: int = 1) -> ModelSizes:
    """The sizes of a model, which does not change; no weight is read.

    `ranks`: if above 1, sizes of weights are those of rank 0. It raises what `cut` raises.
    """
    module = model.module
    if ranks > 1:
        module = _of_rank(model, dtype, ranks).module.model  # type: ignore[assignment]
    modules = dict(module.named_modules())
    layers = {name: each for name, each in modules.items() if isinstance(each, nn.Linear | Conv1D)}
    tables = {each.weight for each in modules.values() if isinstance(each, nn.Embedding)}
    active = active_experts(model.module.config)
    mixtures = {name: each for name, each in modules.items() if _has_kernel(each, active)}
    rows, hidden = _table(model.module).weight.shape
    head = module.get_output_embeddings()  # type: ignore[operator]
    joined = _joined(modules)
    made = sorted(
        replace(
            _linear(name, layer, is_tied=layer.weight in tables, is_head=layer is head),
            joined_with=joined.get(name, ""),
        )
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


def quantized_values(
    model: huggingface.Description, folder: Path, config: Config
) -> dict[str, Values]:
    """The sources of a quantised checkpoint's parameters, by the names of `model`.

    Empty if its files are not at hand, or it is plain. Of numbers only zero points and orders of
    inputs are read. It raises what `sources` raises.
    """
    given, paths = quantization(config), shard_paths(folder)
    at_hand = bool(paths) and all(path.is_file() for path in paths)
    if given is None or not (at_hand or given["quant_method"] == "gguf"):
        return {}
    larger = "" if model.architecture == config["model_type"] else str(config["model_type"])
    with indexed(folder), quiet_loggers(*huggingface.REPORTING):
        return sources(model.module, folder, config, larger)


def kept_tensors(
    model: huggingface.Description, values: Mapping[str, Values], dtype: str, ranks: int
) -> dict[str, KeptAs]:
    """How a checkpoint with these `quantized_values` stores the matrices of each parameter.

    `ranks`: if above 1, how rank 0 has its share of them. It raises what `cut` raises.
    """
    own: Checkpoint | None = Checkpoint(values).renamed(OF_DECODER)
    if ranks > 1 and values:
        own = _of_rank(model, dtype, ranks, own).checkpoint
    assert own is not None
    return {
        name.removeprefix(OF_DECODER): KeptAs(each.form, each.bits)
        for name, each in own.values.items()
        if len(each.shape) > 1
    }


def _table(module: nn.Module) -> nn.Embedding:
    table: nn.Embedding = module.get_input_embeddings()  # type: ignore[operator]
    return table


def _of_rank(
    model: huggingface.Description, dtype: str, ranks: int, checkpoint: Checkpoint | None = None
) -> Model:
    """Rank 0's part of `ranks` of the model, over the numbers of `checkpoint`."""
    decoder = Decoder(model.module)
    whole = Model(decoder, model.architecture, model.layers, 1, model.max_seq_len, dtype)
    with next(decoder.parameters()).fake_mode:  # type: ignore[attr-defined]
        return cut(replace(whole, checkpoint=checkpoint), ranks, 0)


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


def _joined(modules: Mapping[str, nn.Module]) -> dict[str, str]:
    """Name of a layer -> the one that kernels of CPUs join it with: of a gate and an up projection
    of the same outputs, if the gate is silu's."""
    found: dict[str, str] = {}
    for name, module in modules.items():
        activation = getattr(module, "act_fn", None)
        for gate, up in GATES:
            pair = [getattr(module, each, None) for each in (gate, up)]
            if isinstance(activation, SILU) and all(isinstance(each, nn.Linear) for each in pair):
                found |= {f"{name}.{gate}": f"{name}.{up}", f"{name}.{up}": f"{name}.{gate}"}
    return found


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
