"""Map a checkpoint's tensors to a model's parameters, as transformers' loader does.

transformers renames tensors, and merges, splits or transposes some: experts that are stored one by
one become one parameter. This module finds which tensors make which parameter without reading
values. transformers' operations run when a parameter is read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import TYPE_CHECKING

import torch

from kvgraph.compiler.frontends.experts_apart import joined_experts
from kvgraph.compiler.frontends.left_plain import LANGUAGE_PARTS
from kvgraph.compiler.merged import Merged, shared_dtype
from kvgraph.compiler.values import Coded, CodedRows, Part, Rows, Values, combined
from kvgraph.ops.packed import Form

if TYPE_CHECKING:
    from transformers import PreTrainedModel
    from transformers.core_model_loading import WeightConverter


ROW_OPERATIONS = ("Chunk", "Concatenate", "MergeModulelist")
"""Operations of transformers' converters that keep each row of a matrix as it is."""
STACK = "MergeModulelist"


@dataclass
class _Group:
    """The tensors that one converter takes together: `(name, pattern, values)` in order."""

    converter: WeightConverter
    first: str
    sources: list[tuple[str, str, Values]] = field(default_factory=list)

    def run(
        self, model: PreTrainedModel, tensors: Sequence[torch.Tensor], chosen: Sequence[int]
    ) -> dict[str, torch.Tensor]:
        """Run the converter. Return the parameters it makes, by name.

        `chosen`: indices in `sources` of the given `tensors`.
        """
        converter = deepcopy(self.converter)
        for i, tensor in zip(chosen, tensors, strict=True):
            name, pattern, _ = self.sources[i]
            converter.add_tensor(self.first, name, pattern, tensor)
        made = converter.convert(self.first, model=model, config=model.config)
        return {k: v[0] if isinstance(v, list) else v for k, v in made.items()}

    def values(self, model: PreTrainedModel) -> dict[str, Values]:
        dtype = shared_dtype([v for _, _, v in self.sources])
        empty = [torch.empty(v.shape, dtype=dtype, device="meta") for _, _, v in self.sources]
        made = self.run(model, empty, range(len(empty)))
        return {name: _Made(self, model, name, each.shape) for name, each in made.items()}

    @property
    def keeps_rows(self) -> bool:
        """Whether the converter only joins or splits tensors by rows."""
        return all(type(each).__name__ in ROW_OPERATIONS for each in self.converter.operations)

    @property
    def stacked(self) -> list[list[int]]:
        """Indices in `sources` of each pattern's tensors, if the first operation stacks them along
        dim 0; else empty."""
        first = self.converter.operations[0]
        if type(first).__name__ != STACK or first.dim != 0:
            return []
        found: dict[str, list[int]] = {}
        for place, (_, pattern, _) in enumerate(self.sources):
            found.setdefault(pattern, []).append(place)
        return list(found.values())


class _Made(Merged):
    """A parameter that a converter makes of a group of tensors.

    If the tensors are stacked (experts), rows are made of their own tensors only. Coded rows are
    available if the converter keeps rows whole.
    """

    def __init__(
        self, group: _Group, model: PreTrainedModel, name: str, shape: Sequence[int]
    ) -> None:
        super().__init__([each for _, _, each in group.sources], shape)
        self._group, self._model, self._name = group, model, name

    def open(self) -> Rows:
        def merged(chosen: Sequence[int]) -> torch.Tensor:
            return self._merge(chosen, [self.sources[i].read().to(self.dtype) for i in chosen])

        return self._open(merged, _rows)

    @cached_property
    def form(self) -> Form | None:
        if any(each.is_coded_transposed for each in self.sources) or not self._group.keeps_rows:
            return None
        form = self.shared_form()
        return form if form is not None and self._merges_scales(form) else None

    def _merges_scales(self, form: Form) -> bool:
        """Whether the converter merges scales to the shape that fits the merged numbers."""

        def of_scales(shape: Sequence[int]) -> tuple[int, ...]:
            *rows, inputs = shape
            return (*rows, inputs // (form.group or inputs))

        empty = [torch.empty(of_scales(each.shape), device="meta") for each in self.sources]
        try:
            return self._merge(range(len(empty)), empty).shape == of_scales(self.shape)
        except RuntimeError:
            return False

    def open_coded(self) -> CodedRows:
        def merged(chosen: Sequence[int]) -> Coded:
            coded = [self.coded(self.sources[i]) for i in chosen]
            return combined(coded, partial(self._merge, chosen))

        return self._open(merged, lambda whole, a, b: whole.map(lambda part: _rows(part, a, b)))

    def _open(
        self, make: Callable[[Sequence[int]], Part], cut: Callable[[Part, int, int], Part]
    ) -> Callable[[int, int], Part]:
        """A function `(start, stop)` that reads rows.

        For stacked tensors it calls `make` on the rows' own sources. Otherwise `make` runs once on
        all sources, and `cut` takes the rows of the result.
        """
        stacked = self._group.stacked
        if stacked and all(len(places) == self.shape[0] for places in stacked):
            return lambda start, stop: make(
                [place for places in stacked for place in places[start:stop]]
            )
        whole = make(range(len(self.sources)))
        return lambda start, stop: cut(whole, start, stop)

    def _merge(self, chosen: Sequence[int], tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        return self._group.run(self._model, tensors, chosen)[self._name]


def _rows(whole: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    return whole[start:stop]


def of_parameters(
    model: PreTrainedModel,
    stored: Mapping[str, Values],
    larger: str = "",
) -> tuple[dict[str, Values], list[str]]:
    """Values by the names of `model`'s state, and the names of stored tensors without a parameter.

    `larger`: the type of the whole model if `model` is a part of the checkpoint's; its converters
    are used if the part has none. Raises what `joined_experts` raises, and what
    transformers raises when tensors do not fit its operations.
    """
    from transformers import conversion_mapping
    from transformers import core_model_loading as loading

    transforms = conversion_mapping.get_model_conversion_mapping(model)
    renamings = [t for t in transforms if isinstance(t, loading.WeightRenaming)]
    converters = [t for t in transforms if isinstance(t, loading.WeightConverter)]
    if larger and not converters:
        of_larger = conversion_mapping.get_checkpoint_conversion_mapping(larger) or ()
        converters = [t for t in of_larger if isinstance(t, loading.WeightConverter)]
    by_pattern = {pattern: each for each in converters for pattern in each.source_patterns}
    state = model.state_dict(keep_vars=True)
    found: dict[str, Values] = {}
    left: list[tuple[str, str]] = []
    groups: dict[str, _Group] = {}
    own = {"base_model_prefix": model.base_model_prefix, "meta_state_dict": state}
    for name in sorted(stored, key=loading.dot_natural_key):
        renamed, pattern = loading.rename_source_key(name, renamings, converters, **own)
        if renamed not in state and name in state:  # stored under the parameter's own name
            renamed, pattern = name, None
        if renamed not in state:
            left.append((name, renamed))
            continue
        if pattern is None:
            found.setdefault(renamed, stored[name])
        else:
            group = groups.setdefault(renamed, _Group(by_pattern[pattern], renamed))
            group.sources.append((name, pattern, stored[name]))
    for group in groups.values():
        found |= group.values(model)
    apart = {renamed: stored[name] for name, renamed in left}
    joined, used = joined_experts(model, apart, found)
    return found | joined, [name for name, renamed in left if renamed not in used]


def language_part(stored: Mapping[str, Values]) -> dict[str, Values]:
    """Tensors of a larger model by the names that its language part alone would give them.

    All tensors also keep their full names.
    """
    found = dict(stored)
    for name, values in stored.items():
        for part in LANGUAGE_PARTS:
            before, at, behind = name.partition(part)
            if at and before in ("", "model."):
                found[before + behind] = values
    return found
