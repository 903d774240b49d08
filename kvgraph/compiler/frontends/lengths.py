"""Find the longest context that a configuration's rotary parameters allow. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from copy import deepcopy

from kvgraph.contract.manifest_values import MOST
from kvgraph.errors import ModelError

DYNAMIC, LINEAR, YARN = "dynamic", "linear", "yarn"
ORIGINAL = "original_max_position_embeddings"

LONG, FORMER = "longrope", "su"
"""A rope type, and the name that Phi-3's first checkpoints give it."""

RopeParameters = Mapping[str, object]
"""A configuration's `rope_parameters` or `rope_scaling`: for all layers, or by layer type."""


def required_length(own: int) -> int:
    """The configuration's context length. ModelError if no graph has so many tokens."""
    if own > MOST:
        raise ModelError(
            f"config.json: max_position_embeddings: expected at most {MOST}, got {own}; correct "
            "it, or give --max-seq-len"
        )
    return own


def most_tokens(given: RopeParameters, own: int) -> int:
    """Tokens of the longest context for which the rotary frequencies are valid, at least `own`.

    `own`: the context length that the configuration names. Dynamic frequencies stretch to `factor`
    times `own`, and so do linear ones of all layers. YaRN's stretch to `factor` times the original
    length.
    `given`: rotary parameters, for all layers or by layer type. ModelError if a field is no number.
    """
    most = max([own, *(_most(each, own) for each in _by_layer_type(given))])
    # Linear frequencies by layer type (Gemma 3) come with the stretched length.
    return max(most, int(own * number(given, "factor"))) if _kind(given) == LINEAR else most


def with_current_name(config: Mapping[str, object]) -> dict[str, object] | None:
    """A copy of the configuration with LONG in place of the FORMER name; None without that name.

    transformers' Phi-3 replaces it too, but only after it has read the original length, which it
    then lacks; others do not know it.
    """
    found = deepcopy(dict(config))
    parts = [part for part in (found, found.get("text_config")) if isinstance(part, dict)]
    places = [part.get(field) for part in parts for field in ("rope_parameters", "rope_scaling")]
    renamed = False
    for place in places:
        for name in ("rope_type", "type"):
            if isinstance(place, dict) and place.get(name) == FORMER:
                place[name], renamed = LONG, True
    return found if renamed else None


def number(given: RopeParameters, name: str) -> float:
    """The rotary parameter `name`. ModelError if it is no finite number."""
    value = given.get(name)
    if not isinstance(value, int | float) or not math.isfinite(value):
        raise ModelError(
            f"config.json: rope_parameters: {name}: expected a number, got {value!r:.100}"
        )
    return value


def _by_layer_type(given: RopeParameters) -> Iterator[RopeParameters]:
    nested: list[RopeParameters] = [each for each in given.values() if isinstance(each, dict)]
    yield from nested or [given]


def _kind(given: RopeParameters) -> object:
    return given.get("rope_type", given.get("type"))


def _most(given: RopeParameters, own: int) -> int:
    kind = _kind(given)
    if kind == DYNAMIC:
        return int(own * number(given, "factor"))
    if kind == YARN and given.get("factor") is not None:  # None: `own` is the stretched length
        return int(number({ORIGINAL: own, **given}, ORIGINAL) * number(given, "factor"))
    return own
