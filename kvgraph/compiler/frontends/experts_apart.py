"""Experts that a checkpoint stores one by one, for a model that has them in one parameter.

Tools that quantise linear layers store experts so: `experts.0.gate_proj.weight`. transformers'
converters know these names for some models only. The model's module of experts tells the layout of
its parameters (transformers.integrations.moe.use_experts_implementation).
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterator, Mapping, Sequence
from functools import cached_property

import torch
from torch import nn

from kvgraph.compiler.merged import Merged
from kvgraph.compiler.values import Coded, CodedRows, Rows, Values, combined
from kvgraph.errors import ModelError
from kvgraph.ops.packed import Form

NAME = re.compile(r"(.+\.experts)\.\d+\.(?:gate|up|down)_proj\.(?:weight|bias)")

LAYERS = {
    "gate_up_proj": ("gate_proj", "up_proj"),
    "up_proj": ("up_proj",),
    "down_proj": ("down_proj",),
}
"""Name of a parameter of all experts -> the layers of an expert that it consists of."""


def joined_experts(
    model: nn.Module, apart: Mapping[str, Values], others: Container[str]
) -> tuple[dict[str, Values], set[str]]:
    """Values of `model`'s parameters that are made of tensors in `apart`, and these tensors' names.

    `apart`: name of a tensor, as `model` would name it -> values. `others`: parameters that have
    values already. ModelError if tensors of a parameter are missing or differ in shape.
    """
    found: dict[str, Values] = {}
    used: set[str] = set()
    matches = map(NAME.fullmatch, apart)
    prefixes = {match[1] for match in matches if match is not None}
    for prefix, experts in model.named_modules():
        if prefix not in prefixes:
            continue
        names = {
            parameter: each
            for parameter, each in _tensors_of(experts, prefix, apart)
            if f"{prefix}.{parameter}" not in others
        }
        used |= {name for each in names.values() for expert in each for name in expert}
        is_interleaved = not getattr(experts, "is_concatenated", True)
        joined = {
            parameter: _Joined(_sources(each, apart), is_interleaved)
            for parameter, each in names.items()
        }
        shapes = [
            (tuple(experts.get_parameter(parameter).shape[1:]), each.shape[1:])
            for parameter, each in joined.items()
            if len(each.shape) == MATRICES
        ]
        fits_turned = all(held == given[::-1] for held, given in shapes)
        is_transposed = getattr(experts, "is_transposed", fits_turned)
        for parameter, each in joined.items():
            if is_transposed and len(each.shape) == MATRICES:
                each.transpose()
            found[f"{prefix}.{parameter}"] = each
    return found, used


MATRICES = 3
"""Dims of all experts' weights, which are matrices; their biases have one less."""


def _tensors_of(
    experts: nn.Module, prefix: str, apart: Mapping[str, Values]
) -> Iterator[tuple[str, list[list[str]]]]:
    """Each parameter with a tensor in `apart`, and the names of each expert's tensors in order."""
    for parameter, held in experts.named_parameters(recurse=False):
        end = "bias" if parameter.endswith("_bias") else "weight"
        layers = LAYERS.get(parameter.removesuffix("_bias"), ())
        names = [[f"{prefix}.{i}.{layer}.{end}" for layer in layers] for i in range(len(held))]
        if not apart.keys().isdisjoint(name for expert in names for name in expert):
            yield parameter, names


def _sources(names: Sequence[Sequence[str]], apart: Mapping[str, Values]) -> list[list[Values]]:
    first = next(apart[name] for expert in names for name in expert if name in apart)
    for name in (name for expert in names for name in expert):
        if name not in apart:
            raise ModelError(
                f"{first.where}: expected such tensors of all {len(names)} experts, got none for "
                f"{name}"
            )
        if apart[name].shape != first.shape:
            raise ModelError(
                f"{apart[name].where}: expected {list(first.shape)}, as {first.where} has, got "
                f"{list(apart[name].shape)}; one of them is damaged"
            )
    return [[apart[name] for name in expert] for expert in names]


class _Joined(Merged):
    """A parameter of all experts, made of each expert's layers.

    `experts`: each expert's tensors of one shape, `[N, K]` or `[N]`. `is_interleaved`: rows of an
    expert's tensors alternate; else they follow one another. Its shape is `[experts, rows, K]` or
    `[experts, rows]`.
    """

    def __init__(self, experts: Sequence[Sequence[Values]], is_interleaved: bool) -> None:
        rows, *inputs = experts[0][0].shape
        sources = [each for expert in experts for each in expert]
        super().__init__(sources, (len(experts), len(experts[0]) * rows, *inputs))
        self._experts, self._is_interleaved = experts, is_interleaved

    def transpose(self) -> None:
        """Swap the last two dims."""
        experts, rows, inputs = self.shape
        self.shape, self.is_coded_transposed = (experts, inputs, rows), True

    def open(self) -> Rows:
        def rows(start: int, stop: int) -> torch.Tensor:
            experts = self._experts[start:stop]
            read = ([each.read().to(self.dtype) for each in expert] for expert in experts)
            found = torch.stack([self._join(layers) for layers in read])
            return found.transpose(1, 2) if self.is_coded_transposed else found

        return rows

    @cached_property
    def form(self) -> Form | None:
        return self.shared_form()

    def open_coded(self) -> CodedRows:
        def rows(start: int, stop: int) -> Coded:
            experts = self._experts[start:stop]
            read = ([self.coded(each) for each in expert] for expert in experts)
            return combined([combined(layers, self._join) for layers in read], torch.stack)

        return rows

    def _join(self, layers: list[torch.Tensor]) -> torch.Tensor:
        """The rows of an expert's layers in one tensor."""
        if self._is_interleaved and len(layers) > 1:
            return torch.stack(layers, 1).flatten(0, 1)
        return torch.cat(layers)
