"""Read AWQ: 4-bit integers with a scale and a zero point for each group of inputs.

The layout of AutoAWQ's "gemm" version, for a weight of N outputs and K inputs in G groups:

    qweight  int32 [K, N / 8]   eight outputs in a word; the lowest bits hold the outputs in ORDER
    qzeros   int32 [G, N / 8]   in the same order
    scales   float [G, N]
"""

from __future__ import annotations

from collections.abc import Collection
from functools import partial

import torch

from kvgraph.compiler.frontends.folder import Config, first_of
from kvgraph.compiler.quantized.integers import Integers
from kvgraph.compiler.quantized.parts import Parts, read_finite, rule_for, sizes_of_rules, unpack
from kvgraph.compiler.values import Plain, Rows, Values

BITS = 4
LAYOUT, LAYOUTS = "gemm", ("version", "format", "checkpoint_format")
"""The layout that is read, and the fields of AutoAWQ and GPTQModel that name one."""
HALF = 1 << (BITS - 1)
ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Index of the output that each 4 bits of a word hold, from the lowest bits on."""


def weights(parts: Parts, config: Config) -> dict[str, Values]:
    bits = first_of(config, "bits", "w_bit")
    if bits != BITS:
        raise parts.refuse("bits", str(BITS), bits)
    for name in LAYOUTS:
        form = str(config.get(name) or LAYOUT).lower()
        if form != LAYOUT:
            raise parts.refuse(name, repr(LAYOUT), repr(form))
    size = first_of(config, "group_size", "q_group_size")
    sizes = [size] if isinstance(size, int) and size > 0 else []  # -1: whole rows
    sizes += sizes_of_rules(config)
    found = {
        name: parts.read(name, partial(_weight, parts, stem, sizes, rule_for(config, stem)))
        for stem in parts.stems(".qweight")
        for name in [f"{stem}.weight"]
    }
    for stem in parts.stems(".scales"):
        if f"{stem}.weight" not in found:
            raise parts.refuse(
                f"{stem}.scales", "scales of weights alone", "scales of an activation"
            )
    return found


def _weight(parts: Parts, stem: str, sizes: Collection[int], own: Config) -> Values:
    """One weight. `own`: the settings that `dynamic` gives to it alone."""
    if own.get("bits") not in (None, BITS):
        raise parts.refuse(f"dynamic: bits of {stem}", str(BITS), repr(own["bits"]))
    packed = parts.take(f"{stem}.qweight", stem)
    zeros, scales = (parts.take(f"{stem}.{n}", packed.stored.name) for n in ("qzeros", "scales"))
    for part in (packed, zeros):
        parts.require_dtype(part, torch.int32)
    (inputs, words), (groups, _) = parts.require_matrix(packed), parts.require_matrix(scales)
    parts.require_shape(scales, [groups, words * len(ORDER)])
    parts.require_shape(zeros, [groups, words])
    parts.require_even_groups(scales, inputs, groups, sizes)
    parts.kinds.add(f"4 bits in groups of {inputs // groups}")
    return _Grouped(packed, zeros, scales)


class _Grouped(Integers):
    def __init__(self, packed: Plain, zeros: Plain, scales: Plain) -> None:
        shape = packed.shape[1] * len(ORDER), packed.shape[0]
        super().__init__(packed.where, shape, BITS, scales.shape[0])
        self._packed, self._zeros, self._scales = packed, zeros, scales

    def open_numbers(self) -> Rows:
        packed, per = self._packed.read(), len(ORDER)

        def rows(start: int, stop: int) -> torch.Tensor:
            first = start // per * per
            numbers = _in_order(packed[:, first // per : -(-stop // per)])
            return numbers[:, start - first : stop - first].T - HALF

        return rows

    def scales(self) -> torch.Tensor:
        return read_finite(self._scales).T

    def offsets(self) -> torch.Tensor:
        return HALF - _in_order(self._zeros.read()).T


def _in_order(words: torch.Tensor) -> torch.Tensor:
    """Unpack words `[n, words]` to numbers `[n, outputs]`, with outputs in order."""
    found = unpack(words, BITS).unflatten(-1, (-1, len(ORDER)))
    ordered = torch.empty_like(found)
    ordered[..., list(ORDER)] = found
    return ordered.flatten(-2)
