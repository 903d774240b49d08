"""GPTQ: integers of 2, 4 or 8 bits with a scale and a zero point for each group of inputs.

The layout of AutoGPTQ and GPTQModel, for a weight of N outputs and K inputs in G groups:

    qweight  int32 [K * bits / 32, N]   consecutive inputs in a word, the lowest bits first
    qzeros   int32 [G, N * bits / 32]   zero points less one (`checkpoint_format` "gptq"), or
                                        themselves ("gptq_v2")
    scales   float [G, N]
    g_idx    int32 [K]                  the group of each input; with act-order in any order
"""

from __future__ import annotations

import torch

from kvgraph.compiler.frontends.folder import Config
from kvgraph.compiler.quantized.integers import Integers
from kvgraph.compiler.quantized.parts import Parts, read_finite, unpack
from kvgraph.compiler.values import Plain, Rows, Values
from kvgraph.errors import ModelError

BITS = (2, 4, 8)
LESS = {"gptq": 1, "gptq_v2": 0}
"""checkpoint_format -> what a stored zero point is short of."""


def weights(parts: Parts, config: Config) -> dict[str, Values]:
    bits, form = config.get("bits"), config.get("checkpoint_format") or "gptq"
    if bits not in BITS:
        raise parts.refuse("bits", "2, 4 or 8", bits)
    if form not in LESS:
        raise parts.refuse("checkpoint_format", f"one of {list(LESS)}", repr(form))
    stems = list(parts.stems(".qweight"))
    return {f"{stem}.weight": _weight(parts, stem, bits, LESS[form]) for stem in stems}


def _weight(parts: Parts, stem: str, bits: int, less: int) -> Values:
    packed = parts.take(f"{stem}.qweight", stem)
    zeros, scales = (parts.take(f"{stem}.{n}", packed.stored.name) for n in ("qzeros", "scales"))
    index = parts.find(f"{stem}.g_idx")
    per = 32 // bits
    (words, outputs), (groups, _) = parts.require_matrix(packed), parts.require_matrix(scales)
    inputs = words * per
    parts.require_shape(scales, [groups, outputs])
    parts.require_shape(zeros, [groups, -(-outputs // per)])
    if index is not None:
        parts.require_shape(index, [inputs])
    elif inputs % groups:
        raise ModelError(
            f"{scales.where}: expected groups that divide the {inputs} inputs, got {groups}"
        )
    parts.kinds.add(f"{bits} bits in groups of {-(-inputs // groups)}")
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

    def open_numbers(self) -> Rows:
        packed = self._packed.read()

        def rows(start: int, stop: int) -> torch.Tensor:
            return unpack(packed[:, start:stop].T.contiguous(), self._stored_bits) - self._half

        return rows

    def scales(self) -> torch.Tensor:
        return read_finite(self._scales).T

    def offsets(self) -> torch.Tensor:
        zeros = unpack(self._zeros.read(), self._stored_bits)[:, : self.shape[0]].T
        return self._half - self._less - zeros
