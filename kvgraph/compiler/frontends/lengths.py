"""How long contexts may be, by a configuration's rotary parameters. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from kvgraph.errors import ModelError

DYNAMIC, YARN = "dynamic", "yarn"
ORIGINAL = "original_max_position_embeddings"

RopeParameters = Mapping[str, object]
"""A configuration's `rope_parameters`, or `rope_scaling`: of all layers, or of a layer type."""


def most_tokens(given: RopeParameters, own: int) -> int:
    """Tokens that frequencies are for, in a model whose configuration names `own`: dynamic ones
    stretch `factor` times `own`, YaRN's are for `factor` times its original length.

    `given`: of all layers, or by layer type. ModelError where these are no numbers.
    """
    return max([own, *(_most(each, own) for each in _by_layer_type(given))])


def number(given: RopeParameters, name: str) -> float:
    """A field of them; ModelError where it is no finite number."""
    value = given.get(name)
    if not isinstance(value, int | float) or not math.isfinite(value):
        raise ModelError(
            f"config.json: rope_parameters: {name}: expected a number, got {value!r:.100}"
        )
    return value


def _by_layer_type(given: RopeParameters) -> Iterator[RopeParameters]:
    nested: list[RopeParameters] = [each for each in given.values() if isinstance(each, dict)]
    yield from nested or [given]


def _most(given: RopeParameters, own: int) -> int:
    kind = given.get("rope_type", given.get("type"))
    if kind == DYNAMIC:
        return int(own * number(given, "factor"))
    if kind == YARN and given.get("factor") is not None:  # None: as the two lengths say
        return int(number({ORIGINAL: own, **given}, ORIGINAL) * number(given, "factor"))
    return own
