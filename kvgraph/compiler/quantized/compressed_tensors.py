"""Read compressed-tensors, as llm-compressor writes it; a weight's form is found from its tensors.

For a weight of N outputs and K inputs in G groups:

    pack-quantized         weight_packed int32 [N, K * bits / 32], weight_scale [N, G] (or [N, 1]),
                           weight_shape; perhaps weight_zero_point int32 [N * bits / 32, G] and
                           weight_g_idx [K]. Numbers have 2 ** (bits - 1) added.
    int-quantized          weight int8 [N, K], weight_scale [N, G], [N, 1] or [1]; perhaps
                           weight_zero_point and weight_g_idx
    float-quantized        weight float8_e4m3fn, weight_scale of blocks, rows, groups of a row or
                           one; bytes are exponents (mxfp8)
    mxfp4-, nvfp4-pack-    weight_packed uint8 [N, K / 2], weight_scale [N, G]: exponents, or
    quantized              float8_e4m3fn over weight_global_scale

Scales of activations and of a cache are ignored: activations are scaled at run time, and the cache
has its own dtype.
"""

from __future__ import annotations

from functools import partial

import torch

from kvgraph.compiler.frontends.folder import Config, block_of
from kvgraph.compiler.frontends.found_instead import damaged
from kvgraph.compiler.frontends.left_plain import CLASS, Group, groups_for, targets_of
from kvgraph.compiler.frontends.stored_forms import BY_INPUT
from kvgraph.compiler.quantized.floats import FLOAT8, FourBits, scaled
from kvgraph.compiler.quantized.integers import Integers
from kvgraph.compiler.quantized.parts import Parts, group_size, read_finite, unpack
from kvgraph.compiler.values import Plain, Rows, Values

BITS = (2, 4, 8)
PACKED, SCALE = ".weight_packed", ".weight_scale"
ZERO_POINTS = (torch.int8, torch.int32, torch.int64)
DENSE = (None, "dense")
UNREAD = ("mxfp6-pack-quantized",)
"""Formats that are refused by name, because their tensors look like those of another format."""
ASYMMETRIC = "_ASYM"
"""End of the name of a scheme with zero points."""
PRESET_BLOCKS = {"FP8_BLOCK": (128, 128)}
"""Named schemes with scales of blocks -> height and width of a block."""


def weights(parts: Parts, config: Config) -> dict[str, Values]:
    sparsity = (config.get("sparsity_config") or {}).get("format")
    if sparsity not in DENSE:
        raise parts.refuse("sparsity_config", "dense weights", repr(sparsity))
    if (config.get("transform_config") or {}).get("config_groups"):
        raise parts.refuse("transform_config", "none", "transforms of activations")
    for form in _formats(config):
        if form in UNREAD:
            raise parts.refuse("format", "FP4, FP8 or integers", repr(form))
    stems = {*parts.stems(PACKED), *parts.stems(SCALE)}
    return {
        name: parts.read(name, partial(_weight, parts, stem, config))
        for stem in sorted(stems)
        for name in [f"{stem}.weight"]
    }


def _weight(parts: Parts, stem: str, config: Config) -> Values:
    sizes = _sizes(config, stem)
    if f"{stem}{PACKED}" in parts.stored:
        found = _packed(parts, stem, sizes, _bits(config, stem))
    else:
        found = _scaled(parts, stem, sizes, _block(parts, config, stem))
    _require_parts(parts, stem, config)
    return found


def _require_parts(parts: Parts, stem: str, config: Config) -> None:
    """Raise UnsupportedError if a weight lacks zero points or an order of inputs that the layer's
    groups name."""
    groups = groups_for(config, stem)
    zeros, index = f"{stem}.weight_zero_point", f"{stem}.weight_g_idx"
    if groups and zeros not in parts.stored and all(_is_asymmetric(*each) for each in groups):
        raise parts.refuse(zeros, "one for weights that are not symmetric", "none")
    shape = parts.stored[f"{stem}.weight_scale"].shape
    if not shape or shape[-1] == 1 or index in parts.stored:
        return
    if groups and all(_has_order(group) for _, group in groups):
        raise parts.refuse(index, "one, as actorder says", "none")


def _is_asymmetric(name: str, group: Group) -> bool:
    if isinstance(group, list):
        return name.upper().endswith(ASYMMETRIC)
    return (group.get("weights") or {}).get("symmetric") is False


def _has_order(group: Group) -> bool:
    given = {} if isinstance(group, list) else group.get("weights") or {}
    return str(given.get("actorder")).lower() in BY_INPUT


def _formats(config: Config) -> list[object]:
    """The formats that the configuration names, for the whole checkpoint and for its groups."""
    groups = (config.get("config_groups") or {}).values()
    return [each.get("format") for each in (config, *groups) if not isinstance(each, list)]


def _block(parts: Parts, config: Config, stem: str) -> tuple[int, int] | None:
    """Height and width of a block that the layer's groups name, for float8 weights; None: none.

    Of groups with several sizes, those for all linear layers count. UnsupportedError if they have
    several too: the scales of two sizes may have the same shape.
    """
    groups = groups_for(config, stem)
    blocks = {_block_of(*each) for each in groups} - {None}
    if len(blocks) > 1:
        whole = [each for each in groups if CLASS in targets_of(each[1])]
        blocks = {_block_of(*each) for each in whole} - {None} or blocks
    if len(blocks) > 1:
        got = " and ".join(sorted(f"{block[0]} x {block[1]}" for block in blocks if block))
        raise parts.refuse(f"block_structure of {stem}", "one size", got)
    return next(iter(blocks), None)


def _block_of(name: str, group: Group) -> tuple[int, int] | None:
    if isinstance(group, list):  # the name of a scheme, and the modules that it applies to
        return PRESET_BLOCKS.get(name)
    return block_of((group.get("weights") or {}).get("block_structure"))


def _sizes(config: Config, stem: str) -> set[int]:
    """Group sizes that the layer's groups name; empty if a scheme is given by its name alone."""
    found = []
    for _, group in groups_for(config, stem):
        if isinstance(group, list):
            return set()
        found.append((group.get("weights") or {}).get("group_size"))
    return {size for size in found if isinstance(size, int) and size > 0}


def _bits(config: Config, stem: str) -> set[int]:
    """Bits that the layer's groups name; empty if one of them names none."""
    groups = [group for _, group in groups_for(config, stem)]
    said = [None if isinstance(each, list) else each["weights"].get("num_bits") for each in groups]
    bits = {each for each in said if isinstance(each, int)}
    return bits if all(isinstance(each, int) for each in said) else set()


def _require_bits(parts: Parts, stem: str, bits: int, said: set[int]) -> None:
    """Raise UnsupportedError unless the layer's groups may mean `bits`. `said`: see `_bits`.

    Other numbers of bits may have tensors of the same shapes.
    """
    if said and bits not in said:
        got = " or ".join(map(str, sorted(said)))
        name = f"num_bits of {stem}"
        raise parts.refuse(name, f"{bits}, as the shape of its weight_packed says", got)


def _packed(parts: Parts, stem: str, sizes: set[int], said: set[int]) -> Values:
    packed = parts.take(f"{stem}.weight_packed", stem)
    scales = parts.take(f"{stem}.weight_scale", packed.stored.name)
    if packed.dtype == torch.uint8:
        _require_bits(parts, stem, 4, said)
        return _four_bits(parts, stem, packed, scales, sizes)
    parts.require_dtype(packed, torch.int32, torch.uint8)
    outputs, words = parts.require_matrix(packed)
    shape = parts.take(f"{stem}.weight_shape", packed.stored.name)
    parts.require_dtype(shape, torch.int32, torch.int64)
    parts.require_shape(shape, (2,))
    read = shape.read().tolist()
    inputs = read[1]
    if read[0] != outputs or inputs < 1:
        raise damaged(shape.where, f"{outputs} outputs and its inputs", read)
    bits = next((b for b in BITS if -(-inputs * b // 32) == words), None)
    if bits is None:
        raise parts.refuse(f"{stem}.weight_packed", "2, 4 or 8 bits", f"{words * 32 / inputs:g}")
    _require_bits(parts, stem, bits, said)
    groups, index = _groups(parts, stem, scales, (outputs, inputs), sizes)
    zeros = parts.find(f"{stem}.weight_zero_point")
    if zeros is not None:  # packed, or one byte each
        parts.require_dtype(zeros, *ZERO_POINTS)
        parts.require_shape(zeros, (-(-outputs * bits // 32), groups), (outputs, groups))
    return _Integers(packed, scales, zeros, index, bits, (outputs, inputs), groups)


def _four_bits(parts: Parts, stem: str, packed: Plain, scales: Plain, sizes: set[int]) -> FourBits:
    """FP4 weights. Scales that are not exponents are relative to `weight_global_scale`."""
    parts.require_matrices(packed)
    inputs, count = packed.shape[-1] * 2, scales.shape[-1] if scales.shape else 1
    parts.require_shape(scales, (*packed.shape[:-1], count))
    parts.require_even_groups(scales, inputs, count, sizes)
    name = f"{stem}.weight_global_scale"
    is_exponent = scales.dtype == torch.uint8
    whole = parts.find(name) if is_exponent else parts.take(name, scales.stored.name)
    if whole is not None:
        parts.require_shape(whole, (), (1,))
    parts.kinds.add(f"4 bits in groups of {inputs // count}")
    return FourBits(packed, scales, whole)


def _scaled(parts: Parts, stem: str, sizes: set[int], block: tuple[int, int] | None) -> Values:
    scales = parts.take(f"{stem}.weight_scale", stem)
    numbers = parts.take(f"{stem}.weight", scales.stored.name)
    if numbers.stored.dtype == FLOAT8:
        return scaled(parts, numbers, scales, block, sizes)
    if numbers.dtype != torch.int8:
        raise parts.refuse(f"{stem}.weight", "int8 or float8_e4m3fn", numbers.stored.dtype)
    outputs, inputs = parts.require_matrix(numbers)
    groups, index = _groups(parts, stem, scales, (outputs, inputs), sizes)
    zeros = parts.find(f"{stem}.weight_zero_point")
    if zeros is not None:
        parts.require_dtype(zeros, *ZERO_POINTS)
        parts.require_shape(zeros, scales.shape)
    return _Integers(numbers, scales, zeros, index, 8, (outputs, inputs), groups)


def _groups(
    parts: Parts, stem: str, scales: Plain, shape: tuple[int, int], sizes: set[int]
) -> tuple[int, Plain | None]:
    """Number of groups of a row, and the tensor with the group of each input.

    The tensor is None if inputs are in order; then all groups must be of equal size.
    """
    outputs, inputs = shape
    count = scales.shape[-1] if len(scales.shape) == 2 else 1
    index = parts.find_index(f"{stem}.weight_g_idx", inputs, count)
    if index is None:
        parts.require_even_groups(scales, inputs, count, sizes)
    parts.require_shape(scales, (outputs, count), (1,), ())
    whole = "one scale" if scales.shape in ((), (1,)) and outputs > 1 else "a scale a row"
    parts.kinds.add(whole if count == 1 else f"groups of {group_size(inputs, count)}")
    return count, index


class _Integers(Integers):
    def __init__(
        self,
        numbers: Plain,
        scales: Plain,
        zeros: Plain | None,
        index: Plain | None,
        bits: int,
        shape: tuple[int, int],
        groups: int,
    ) -> None:
        super().__init__(numbers.where, shape, bits, groups, index)
        self._numbers, self._scales, self._zeros = numbers, scales, zeros
        self._stored_bits = bits

    def open_numbers(self) -> Rows:
        numbers = self._numbers.open()
        if not self._is_packed(self._numbers):
            return numbers
        return lambda start, stop: self._unpacked(numbers(start, stop))[:, : self.shape[1]]

    def scales(self) -> torch.Tensor:
        return read_finite(self._scales).reshape(-1, self._groups).expand(self.shape[0], -1)

    def offsets(self) -> torch.Tensor | None:
        if self._zeros is None:
            return None
        found = self._zeros.read()
        words = -(-self.shape[0] * self._stored_bits // 32), self._groups
        if self._is_packed(self._zeros) and self._zeros.shape == words:
            return -self._unpacked(found.T.contiguous()).T[: self.shape[0]]
        return -found.int().reshape(-1, self._groups).expand(self.shape[0], -1)

    def _unpacked(self, words: torch.Tensor) -> torch.Tensor:
        return unpack(words, self._stored_bits) - (1 << (self._stored_bits - 1))

    @staticmethod
    def _is_packed(part: Plain) -> bool:
        return part.dtype == torch.int32
