"""Read GPTQ: integers of 2, 4 or 8 bits with a scale and a zero point for each group of inputs.

The layout of AutoGPTQ and GPTQModel, for a weight of N outputs and K inputs in G groups:

    qweight  int32 [K * bits / 32, N]   consecutive inputs in a word, the lowest bits first
    qzeros   int32 [G, N * bits / 32]   words of zero points minus one (`checkpoint_format` "gptq"),
                                        or of zero points ("gptq_v2")
    scales   float [G, N]
    g_idx    int32 [K]                  the group of each input; with act-order in any order

Some layers may have other bits or another group size than the rest; `dynamic` says so.
"""

from __future__ import annotations

from functools import partial

import torch

from kvgraph.compiler.frontends.folder import Config
from kvgraph.compiler.quantized.integers import Integers
from kvgraph.compiler.quantized.parts import (
    Parts,
    group_size,
    read_finite,
    rule_for,
    sizes_of_rules,
    unpack,
)
from kvgraph.compiler.values import Plain, Rows, Values

BITS = (2, 4, 8)
LESS = {"gptq": 1, "gptq_v2": 0}
"""`checkpoint_format` -> number to add to each stored zero point."""


def weights(parts: Parts, config: Config) -> dict[str, Values]:
    bits = config.get("bits")
    form = config.get("checkpoint_format") or config.get("format") or "gptq"
    if not isinstance(bits, int) or bits not in BITS:
        raise parts.refuse("bits", "2, 4 or 8", repr(bits))
    if not isinstance(form, str) or form not in LESS:
        raise parts.refuse("checkpoint_format", f"one of {list(LESS)}", repr(form))
    for name in ("rotation", "is_marlin_format"):
        if config.get(name):
            raise parts.refuse(name, "none", repr(config[name]))

    def weight(stem: str) -> Values:
        found = _weight(parts, stem, bits, LESS[form])
        _require_said(parts, stem, found, config)
        return found

    return {
        name: parts.read(name, partial(weight, stem))
        for stem in parts.stems(".qweight")
        for name in [f"{stem}.weight"]
    }


def _require_said(parts: Parts, stem: str, weight: _Grouped, config: Config) -> None:
    """Raise UnsupportedError if the configuration says other bits of a weight, or an order of
    inputs or groups that its tensors lack."""
    own = rule_for(config, stem)
    if own.get("bits") not in (None, weight._stored_bits):
        wanted = f"{weight._stored_bits}, as the shape of its qzeros says"
        raise parts.refuse(f"dynamic: bits of {stem}", wanted, repr(own["bits"]))
    is_ordered = weight._groups > 1 and _is_ordered({**config, **own})
    if is_ordered and weight._index is None:
        got = "one that is not filled in" if f"{stem}.g_idx" in parts.stored else "none"
        raise parts.refuse(f"{stem}.g_idx", "one, as desc_act says", got)
    size = config.get("group_size")
    if all(map(weight.has_uneven_groups, [size, *sizes_of_rules(config)])):
        raise parts.refuse(f"{stem}.g_idx", f"one, for groups of {size}", "none")


def _is_ordered(given: Config) -> bool:
    """Whether groups are in the order of activations, by a layer's settings."""
    return bool(given.get("desc_act")) and not given.get("static_groups")


def _weight(parts: Parts, stem: str, usual: int, less: int) -> _Grouped:
    """One weight, of `usual` bits or, if its zero points have another width, of their bits."""
    packed = parts.take(f"{stem}.qweight", stem)
    zeros, scales = (parts.take(f"{stem}.{n}", packed.stored.name) for n in ("qzeros", "scales"))
    for part in (packed, zeros):
        parts.require_dtype(part, torch.int32)
    (words, outputs), (groups, _) = parts.require_matrix(packed), parts.require_matrix(scales)
    width = parts.require_matrix(zeros)[1]
    bits = next((b for b in (usual, *BITS) if -(-outputs * b // 32) == width), None)
    if bits is None:
        got = f"{width * 32 / max(1, outputs):g}"
        raise parts.refuse(zeros.stored.name, "2, 4 or 8 bits", got)
    per = 32 // bits
    inputs = words * per
    parts.require_shape(scales, [groups, outputs])
    parts.require_shape(zeros, [groups, -(-outputs // per)])
    index = parts.find_index(f"{stem}.g_idx", inputs, groups)
    if index is None:
        parts.require_even_groups(scales, inputs, groups, ())
    parts.kinds.add(f"{bits} bits in groups of {group_size(inputs, groups)}")
    return _Grouped(packed, zeros, scales, index, bits, less, (outputs, inputs))


class _Grouped(Integers):
    def __init__(
        self,
        packed: Plain,
        zeros: Plain,
        scales: Plain,
        index: Plain | None,
        bits: int,
        less: int,
        shape: tuple[int, int],
    ) -> None:
        super().__init__(packed.where, shape, bits, scales.shape[0], index)
        self._packed, self._zeros, self._scales = packed, zeros, scales
        self._stored_bits, self._half, self._less = bits, 1 << (bits - 1), less

    def has_uneven_groups(self, size: object) -> bool:
        """Whether inputs are in order and groups of `size` do not divide them, so the last group
        would be shorter."""
        if self._index is not None or not isinstance(size, int) or size <= 0:
            return False
        return size * self._groups != self.shape[1] and self._groups > 1

    def open_numbers(self) -> Rows:
        packed = self._packed.read()

        def rows(start: int, stop: int) -> torch.Tensor:
            return unpack(packed[:, start:stop].T.contiguous(), self._stored_bits) - self._half

        return rows

    def scales(self) -> torch.Tensor:
        return read_finite(self._scales).T

    def offsets(self) -> torch.Tensor:
        words = self._zeros.read()
        if self._less:  # added to whole words, with carries, as it was subtracted from them
            ones = sum(1 << place for place in range(0, 32, self._stored_bits))
            words = (words.long() + ones).to(torch.int32)
        return self._half - unpack(words, self._stored_bits)[:, : self.shape[0]].T
