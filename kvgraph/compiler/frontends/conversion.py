"""Tensors of a checkpoint by the names of a model's parameters, as transformers' loader maps them.

transformers renames tensors, and merges, splits or transposes some (experts that are stored one by
one are one parameter). Which of them become which parameter is found here without their numbers;
its operations run where a parameter is read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING

import torch

from kvgraph.compiler.values import Coded, CodedRows, Converted, Values
from kvgraph.ops.packed import Form

if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from transformers.core_model_loading import WeightConverter


ROW_OPERATIONS = ("Chunk", "Concatenate", "MergeModulelist")
"""Of transformers' converters, those that keep a row of inputs as it is."""

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
            name: _Merged(
                where,
                tensor.shape,
                dtype,
                partial(self._compute, model, name, dtype),
                [each for _, _, each in self.sources] if self._keeps_rows else [],
                partial(self._part, model, name),
            )
            for name, tensor in self.run(model, empty).items()
        }

    @property
    def _keeps_rows(self) -> bool:
        """Whether it only puts rows behind each other, or apart."""
        return all(type(each).__name__ in ROW_OPERATIONS for each in self.converter.operations)

    def _part(self, model: PreTrainedModel, name: str, tensors: list[torch.Tensor]) -> torch.Tensor:
        return self.run(model, tensors)[name]

    def _compute(self, model: PreTrainedModel, name: str, dtype: torch.dtype) -> torch.Tensor:
        return self.run(model, [each.read().to(dtype) for _, _, each in self.sources])[name]


class _Merged(Converted):
    """A tensor of others, whose coded rows are theirs where the conversion keeps rows whole."""

    def __init__(
        self,
        where: str,
        shape: Sequence[int],
        dtype: torch.dtype,
        compute: Callable[[], torch.Tensor],
        sources: list[Values],
        merge: Callable[[list[torch.Tensor]], torch.Tensor],
    ) -> None:
        super().__init__(where, shape, dtype, compute)
        self.bits = max((each.bits for each in sources), default=self.bits)
        self._sources, self._merge = sources, merge

    @cached_property
    def form(self) -> Form | None:
        forms = [each.form for each in self._sources]
        if not forms or None in forms or any(s.is_coded_transposed for s in self._sources):
            return None
        found = [form for form in forms if form is not None]
        one = {replace(form, has_offsets=False) for form in found}
        if len(one) > 1:
            return None
        form = replace(found[0], has_offsets=any(each.has_offsets for each in found))
        return form if self._fits(form) else None

    def _fits(self, form: Form) -> bool:
        """Whether scales are merged as numbers are."""
        inputs = [source.shape[-1] for source in self._sources]
        scales = [
            torch.empty((*s.shape[:-1], k // (form.group or k)), device="meta")
            for s, k in zip(self._sources, inputs, strict=True)
        ]
        try:
            shape = tuple(self._merge(scales).shape)
        except RuntimeError:
            return False
        return shape == (*self.shape[:-1], self.shape[-1] // (form.group or self.shape[-1]))

    def open_coded(self) -> CodedRows:
        parts = [source.open_coded()(0, source.count) for source in self._sources]
        offsets = None
        if any(part.offsets is not None for part in parts):
            offsets = self._merge(
                [
                    torch.zeros_like(p.scales, dtype=torch.int8) if p.offsets is None else p.offsets
                    for p in parts
                ]
            )
        numbers = self._merge([part.numbers for part in parts])
        whole = Coded(numbers, self._merge([part.scales for part in parts]), offsets)
        return lambda start, stop: whole.map(lambda part: part[start:stop])


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
