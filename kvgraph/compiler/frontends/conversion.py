"""Tensors of a checkpoint by the names of a model's parameters, as transformers' loader maps them.

transformers renames tensors, and merges, splits or transposes some (experts that are stored one by
one are one parameter). Which of them become which parameter is found here without their numbers;
its operations run where a parameter is read.
"""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import torch

from kvgraph.compiler.values import Converted, Values

if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from transformers.core_model_loading import WeightConverter


LANGUAGE_PARTS = ("language_model.", "text_model.")
"""What a larger model calls its language part, before or behind `model.`."""


@dataclass
class _Group:
    """Tensors that one converter takes together, in order, by its patterns."""

    converter: WeightConverter
    first: str
    sources: list[tuple[str, str, Values]] = field(default_factory=list)

    def run(self, model: PreTrainedModel, tensors: list[torch.Tensor]) -> dict[str, torch.Tensor]:
        converter = deepcopy(self.converter)
        for (name, pattern, _), tensor in zip(self.sources, tensors, strict=True):
            converter.add_tensor(self.first, name, pattern, tensor)
        made = converter.convert(self.first, model=model, config=model.config)
        return {k: v[0] if isinstance(v, list) else v for k, v in made.items()}

    def values(self, model: PreTrainedModel) -> dict[str, Values]:
        kinds = {each.dtype for _, _, each in self.sources}
        dtype = kinds.pop() if len(kinds) == 1 else torch.float32
        empty = [torch.empty(v.shape, dtype=dtype, device="meta") for _, _, v in self.sources]
        where = self.sources[0][2].where
        return {
            name: Converted(where, tensor.shape, dtype, partial(self._compute, model, name, dtype))
            for name, tensor in self.run(model, empty).items()
        }

    def _compute(self, model: PreTrainedModel, name: str, dtype: torch.dtype) -> torch.Tensor:
        return self.run(model, [each.read().to(dtype) for _, _, each in self.sources])[name]


def of_parameters(model: PreTrainedModel, stored: Mapping[str, Values]) -> dict[str, Values]:
    """Values by the names of `model`'s state; those of no parameter are left out.

    Raises what transformers raises where tensors do not fit its operations.
    """
    from transformers import conversion_mapping
    from transformers import core_model_loading as loading

    transforms = conversion_mapping.get_model_conversion_mapping(model)
    renamings = [t for t in transforms if isinstance(t, loading.WeightRenaming)]
    converters = [t for t in transforms if isinstance(t, loading.WeightConverter)]
    by_pattern = {pattern: each for each in converters for pattern in each.source_patterns}
    state = model.state_dict(keep_vars=True)
    found: dict[str, Values] = {}
    groups: dict[str, _Group] = {}
    own = {"base_model_prefix": model.base_model_prefix, "meta_state_dict": state}
    for name in sorted(stored, key=loading.dot_natural_key):
        renamed, pattern = loading.rename_source_key(name, renamings, converters, **own)
        if renamed not in state and name in state:  # it has the parameter's own name
            renamed, pattern = name, None
        if renamed not in state:
            continue
        if pattern is None:
            found.setdefault(renamed, stored[name])
        else:
            group = groups.setdefault(renamed, _Group(by_pattern[pattern], renamed))
            group.sources.append((name, pattern, stored[name]))
    for group in groups.values():
        found |= group.values(model)
    return found


def language_part(stored: Mapping[str, Values]) -> dict[str, Values]:
    """Tensors of a larger model by the names that its language part alone would give them; those
    of other parts keep theirs, and are of no parameter."""
    found = dict(stored)
    for name, values in stored.items():
        for part in LANGUAGE_PARTS:
            before, at, behind = name.partition(part)
            if at and before in ("", "model."):
                found[before + behind] = values
    return found
