"""Tensors that are made of several tensors of a checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from kvgraph.compiler.values import Coded, Values
from kvgraph.ops.packed import Form


def shared_dtype(sources: Sequence[Values]) -> torch.dtype:
    """The dtype of all `sources`; float32 if they differ."""
    kinds = {each.dtype for each in sources}
    return kinds.pop() if len(kinds) == 1 else torch.float32


class Merged(Values):
    """A tensor that is made of `sources`."""

    def __init__(self, sources: Sequence[Values], shape: Sequence[int]) -> None:
        self.where, self.shape = sources[0].where, tuple(shape)
        self.dtype = shared_dtype(sources)
        self.bits = max(each.bits for each in sources)
        self.least_bits = min(each.bits for each in sources)
        self.stored_bits = min(each.stored_bits for each in sources)
        kinds = {each.plain_dtype for each in sources}
        self.plain_dtype = kinds.pop() if len(kinds) == 1 else None
        self.x_bits = min(each.x_bits for each in sources)
        self.sources = sources

    def shared_form(self) -> Form | None:
        """The stored form of all sources, with offsets if one of them has; None if they have none
        or differ."""
        forms = [each.form for each in self.sources]
        known = [form for form in forms if form is not None]
        if len(known) < len(forms):
            return None
        has_offsets = any(form.has_offsets for form in known)
        alike = {replace(form, has_offsets=has_offsets) for form in known}
        return alike.pop() if len(alike) == 1 else None

    def coded(self, source: Values) -> Coded:
        """All stored rows of a source, with offsets if another source has them."""
        found = source.open_coded()(0, source.count)
        if self.form is not None and self.form.has_offsets and found.offsets is None:
            return replace(found, offsets=torch.zeros_like(found.scales, dtype=torch.int8))
        return found
