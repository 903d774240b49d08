"""The form in which layers that become one node are packed. Needs no torch, so that plans use it.

Decision: a compile and a plan ask this one rule, so a plan's bytes are those of the artifact.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from kvgraph.ops.packed import E4M3, FP4, Form, least_group

PLAIN_BITS = 16
"""Bits of the packed weights that are nearest to a plain checkpoint's."""

Takes = Callable[[Form], bool]
"""`takes(form)`: whether kernels support a form."""


class Kept(Protocol):
    """A weight as a checkpoint stores it.

    `form`: its stored form, if kernels may support it; None: it can only be read as numbers.
    `bits`: bits of the packed weights that are nearest to it.
    """

    @property
    def form(self) -> Form | None: ...

    @property
    def bits(self) -> int: ...


@dataclass(frozen=True)
class KeptAs:
    """The `Kept` of a weight that a plan knows of."""

    form: Form | None
    bits: int


def kept_in(form: Form) -> KeptAs:
    """What a weight is that is stored in `form`. Without groups there is no form to keep."""
    if not form.group:
        return KeptAs(None, form.bits)
    return KeptAs(form, PLAIN_BITS if form.codes == E4M3 else 8 if form.codes in FP4 else form.bits)


def joined_form(layers: Sequence[Kept], takes: Takes) -> tuple[Form, bool]:
    """The form of layers that become one node, and whether it is as stored: one stored form that
    fits all layers or, if there is none, the bits nearest to their forms."""
    forms = [layer.form for layer in layers]
    known = [form for form in forms if form is not None and takes(form)]
    if len(known) == len(forms):
        one = replace(
            known[0],
            group=math.gcd(*(form.group for form in known)),
            has_offsets=any(form.has_offsets for form in known),
        )
        alike = {replace(f, group=one.group, has_offsets=one.has_offsets) for f in known}
        grouped = {bool(form.group) for form in known}
        if len(alike) == len(grouped) == 1 and one.group % least_group(one.codes) == 0:
            return one, True
    return nearest_form(max(layer.bits for layer in layers), takes), False


def nearest_form(bits: int, takes: Takes) -> Form:
    """The form of `bits`, or of PLAIN_BITS if kernels do not support that."""
    return Form(bits) if takes(Form(bits)) else Form(PLAIN_BITS)
