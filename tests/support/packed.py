"""Packed weights that are whole in memory, of arrays; a compile packs them part by part."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from kvgraph.compiler.packed_weights import (
    OPERANDS,
    Packed,
    Section,
    StoredRows,
    joined,
    pack_in_parts,
    pack_in_turn,
)
from kvgraph.contract.dims import Array
from kvgraph.ops.packed import Form


def pack(
    weights: Sequence[Array],
    bits: int,
    bias: Sequence[Array | None] = (),
    *,
    interleave: bool = False,
) -> Packed:
    """Pack float32 weights `[N, K]` of equal K to `bits`, one after the other.

    `interleave`: two weights take turns panel by panel.
    """
    sections = _sections(weights, bias)
    width = weights[0].shape[1]
    return joined(pack_in_parts(sections, width, Form(bits), interleave=interleave))


def pack_each(
    experts: Iterable[tuple[Sequence[Array], Sequence[Array | None]]], bits: int
) -> Packed:
    """Pack weights and biases of each expert; operands have the experts as first dim.

    Two weights of an expert are gate and up, which take turns panel by panel.
    """
    given = list(experts)
    each = [_sections(weights, biases) for weights, biases in given]
    width, has_bias = given[0][0][0].shape[1], each[0][0].bias is not None
    whole = joined(pack_in_turn(each, width, Form(bits), has_bias=has_bias))
    arrays = {name: getattr(whole, name) for name in OPERANDS}
    apart = {
        name: array.reshape(len(each), -1, *array.shape[1:])
        for name, array in arrays.items()
        if array is not None
    }
    return replace(whole, **apart)


def keep(parts: Sequence[StoredRows], form: Form, *, interleave: bool = False) -> Packed:
    """Pack stored rows without rounding; otherwise like `pack`."""
    sections, width = [Section.kept(part) for part in parts], parts[0].numbers.shape[1]
    return joined(pack_in_parts(sections, width, form, interleave=interleave))


def _sections(weights: Sequence[Array], biases: Sequence[Array | None]) -> list[Section]:
    given = list(biases) or [None] * len(weights)
    return [Section.of(w, b) for w, b in zip(weights, given, strict=True)]
