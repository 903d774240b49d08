"""Describe a checkpoint by the model that transformers builds of its configuration."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers.activations import SiLUActivation
from transformers.pytorch_utils import Conv1D

from kvgraph.compiler.checkpoint import Checkpoint
from kvgraph.compiler.checkpoint_files import indexed, read_index, shard_paths
from kvgraph.compiler.described import Experts, Linear, ModelSizes
from kvgraph.compiler.frontends import huggingface
from kvgraph.compiler.frontends.decoder import Decoder
from kvgraph.compiler.frontends.folder import GGUF, Config, quantization
from kvgraph.compiler.frontends.left_plain import EXPERT, left_plain
from kvgraph.compiler.frontends.ranks import SHARE_TABLES, cut
from kvgraph.compiler.frontends.routing import active_experts
from kvgraph.compiler.frontends.stored_forms import PLAIN, stored_forms
from kvgraph.compiler.frontends.weightless import Located, locate, require_loadable
from kvgraph.compiler.joined_forms import KeptAs, kept_in
from kvgraph.compiler.model import Model
from kvgraph.compiler.quantized import require_plain_names
from kvgraph.compiler.quiet import quiet_loggers
from kvgraph.compiler.values import Rows, Values
from kvgraph.ops.packed import Form

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


def describe(
    model: huggingface.Description,
    dtype: str,
    ranks: int = 1,
    checkpoint: Checkpoint | None = None,
) -> ModelSizes:
    """The sizes of a model, which does not change, and the forms of its weights in `checkpoint`.

    `ranks`: if above 1, sizes of weights are those of rank 0. It raises what `cut` raises.
    """
    own = Checkpoint({}) if checkpoint is None else checkpoint.renamed(OF_DECODER)
    module = model.module
    if ranks > 1:
        part = _of_rank(model, dtype, ranks, own if checkpoint else None)
        module, own = part.module.model, part.checkpoint or own  # type: ignore[assignment]
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
    sizes = ModelSizes(
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
        share_bytes=sum(_share_bytes(module)),
        experts=tuple(_experts(name, mixture, active) for name, mixture in mixtures.items()),
        notes=tuple(dict.fromkeys(_notes(modules.values(), active))),
    )
    return sizes.kept_as(_kept(own))


def located(model: huggingface.Description, folder: Path, config: Config) -> Located:
    """The sources of a checkpoint's parameters, by the names of `model`; none if its files are not
    at hand, or transformers has to load them.

    Of numbers only zero points, orders of inputs and tied parameters that are stored apart are
    read. It raises what a compile raises.
    """
    given, paths = quantization(config), shard_paths(folder)
    at_hand = bool(paths) and all(path.is_file() for path in paths)
    if not at_hand and (given is None or given["quant_method"] != GGUF):
        if given is None and (index := read_index(folder)):
            require_plain_names(folder, index.shards)
        return Located(None)
    with indexed(folder), quiet_loggers(*huggingface.REPORTING):
        found = locate(model.module, folder, config, model.larger)
        require_loadable(found, folder, config, is_built=model.is_built)
    return found


def untie(model: huggingface.Description, names: Sequence[str]) -> None:
    """Make parameters of their own of the tied ones with these names, as transformers does for
    those that are stored with different values."""
    for name in names[1:]:
        path, _, own = name.rpartition(".")
        tied = model.module.get_parameter(name)
        with tied.fake_mode:  # type: ignore[attr-defined]
            apart = nn.Parameter(torch.empty_like(tied), requires_grad=False)
        model.module.get_submodule(path)._parameters[own] = apart


def said(model: huggingface.Description, config: Config) -> Checkpoint:
    """The parameters of `model` in the forms that the configuration says; none can be read."""
    modules = dict(model.module.named_modules())
    head = model.module.get_output_embeddings()  # type: ignore[operator]
    is_plain = {matrix: left_plain(config, ends) for matrix, ends in EXPERT.items()}
    of_linears = left_plain(config)
    state = model.module.state_dict(keep_vars=True)

    def of(name: str) -> tuple[Form, bool]:
        """The form of a parameter, and whether its last dims are inputs, outputs."""
        path, _, own = name.rpartition(".")
        module = modules[path]
        if own in EXPERT:
            names = [f"{path}{end}" for end in EXPERT[own]]
            plain, form = is_plain[own](path), stored_forms(config, names).experts
            return PLAIN if plain else form, getattr(module, "is_transposed", True)
        if own != "weight" or not isinstance(module, nn.Linear | Conv1D):
            return PLAIN, False
        forms = stored_forms(config, [path])
        plain, form = of_linears(path), forms.head if module is head else forms.linears
        return PLAIN if plain else form, isinstance(module, Conv1D)

    return Checkpoint({name: _Said(tuple(each.shape), *of(name)) for name, each in state.items()})


class _Said(Values):
    """A parameter of which only the form is known. A group is at most a whole row."""

    where, dtype = "a parameter whose tensors are not at hand", torch.bfloat16

    def __init__(self, shape: tuple[int, ...], form: Form, is_transposed: bool) -> None:
        self.shape, self.is_coded_transposed = shape, is_transposed and len(shape) > 1
        inputs = shape[-2 if self.is_coded_transposed else -1] if shape else 1
        self._kept = kept_in(replace(form, group=min(form.group, inputs)))
        self.bits = self._kept.bits

    def open(self) -> Rows:
        raise NotImplementedError(self.where)

    @property
    def form(self) -> Form | None:
        return self._kept.form


def _kept(checkpoint: Checkpoint) -> dict[str, KeptAs]:
    """How a checkpoint stores the matrices of each parameter, by the names of a Decoder."""
    return {
        name.removeprefix(OF_DECODER): KeptAs(each.form, each.bits)
        for name, each in checkpoint.values.items()
        if len(each.shape) > 1
    }


def _table(module: nn.Module) -> nn.Embedding:
    table: nn.Embedding = module.get_input_embeddings()  # type: ignore[operator]
    return table


def _of_rank(
    model: huggingface.Description, dtype: str, ranks: int, checkpoint: Checkpoint | None
) -> Model:
    """Rank 0's part of `ranks` of the model, over the numbers of `checkpoint`."""
    decoder = Decoder(model.module)
    whole = Model(decoder, model.architecture, model.layers, 1, model.max_seq_len, dtype)
    with next(decoder.parameters()).fake_mode:  # type: ignore[attr-defined]
        return cut(replace(whole, checkpoint=checkpoint), ranks, 0)


def _share_bytes(module: nn.Module) -> Iterator[int]:
    """Bytes of each table by which a rank finds its share."""
    for name, table in module.named_buffers():
        if name.rpartition(".")[2] in SHARE_TABLES:
            yield table.nbytes


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
