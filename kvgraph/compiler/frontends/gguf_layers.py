"""GGUF: fields of a configuration that are not the same in all layers, and those of experts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kvgraph.compiler.frontends.folder import FULL, SLIDING
from kvgraph.compiler.frontends.gguf_fields import entries
from kvgraph.compiler.frontends.gguf_file import Metadata
from kvgraph.contract.plain import JsonObject

MIXTRAL = {"expert_count": "num_local_experts", "expert_used_count": "num_experts_per_tok"}


def uniform(given: Metadata, said: JsonObject, width: int) -> JsonObject:
    """A model whose layers are all equal."""
    given.require("rope.dimension_count", width)
    return {}


def has_biases(given: Metadata, layer: str) -> bool:
    """Whether a linear layer, such as `attn_q` or `ffn_up`, has biases."""
    return given.has(f"blk.0.{layer}.bias")


def partial(given: Metadata, said: JsonObject, width: int) -> JsonObject:
    """A part of each head has rotary embeddings."""
    part = given.number("rope.dimension_count", width) / width
    return {"rope_parameters": said["rope_parameters"] | {"partial_rotary_factor": part}}


def window(given: Metadata, default: int) -> int:
    """Tokens of a window, which layers must have."""
    length = int(given.number("attention.sliding_window", default))
    if length < 1:
        raise given.refuse("attention.sliding_window", "a number above 0")
    return length


def layer_types(given: Metadata, layers: int, every: int) -> list[str]:
    """Which layers have a window. `every`: the period, whose last layer has none, if the file
    names none."""
    name = "attention.sliding_window_pattern"
    each = entries(given.reader, f"{given.kind}.{name}")
    period = every if given.get(name) is None else given.get(name)
    if isinstance(period, int):
        each = [not period or layer % period < period - 1 for layer in range(layers)]
    if len(each) != layers:
        raise given.refuse(name, f"a number, or one for each of {layers} layers")
    return [SLIDING if has_window else FULL for has_window in each]


def of_layers(given: Metadata, name: str, are_first: Sequence[bool]) -> tuple[int, int]:
    """The numbers of a field for the first of two kinds of layers, and for the others.

    UnsupportedError if a kind has several numbers.
    """
    each = entries(given.reader, f"{given.kind}.{name}")
    if not each:
        number = int(given.required(name))
        return number, number
    if len(each) != len(are_first):
        raise given.refuse(name, f"a number, or one for each of {len(are_first)} layers")
    kinds = [
        {n for n, first in zip(each, are_first, strict=True) if first == kind}
        for kind in (True, False)
    ]
    numbers = [n for kind in kinds for n in kind if isinstance(n, int) and n > 0]
    if len(numbers) != sum(map(bool, kinds)):
        raise given.refuse(name, "one number above 0 for each of two kinds of layers")
    return numbers[0], numbers[-1]


def experts(given: Metadata, names: Mapping[str, str]) -> JsonObject:
    return {name: given.required(own) for own, name in names.items()}
