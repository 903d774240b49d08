"""A checkpoint's default sampling: the fields of generation_config.json that set it.

A missing field has no effect, as in vLLM; transformers uses a top_k of 50 then.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from kvgraph.contract.plain import JsonObject
from kvgraph.contract.values import require_integer, require_number
from kvgraph.errors import RequestError

GENERATION = "generation_config.json"

GREEDY_TOO: dict[str, object] = {"repetition_penalty": 1}
SAMPLED: dict[str, object] = {"top_k": 0, "top_p": 1, "min_p": 0}
"""Fields that SamplingParams have too, each with the value that has no effect."""

NUMBERS: dict[str, tuple[Callable[[float], bool], str]] = {
    "temperature": (lambda x: 0 <= x < math.inf, ">= 0 and finite"),
    "top_p": (lambda x: 0 < x <= 1, "in (0, 1]"),
    "min_p": (lambda x: 0 <= x <= 1, "in [0, 1]"),
    "repetition_penalty": (lambda x: 1e-9 <= x <= 1e9, "in [1e-9, 1e9]"),  # of float32 logits
    "presence_penalty": (lambda x: -2 <= x <= 2, "in [-2, 2]"),
    "frequency_penalty": (lambda x: -2 <= x <= 2, "in [-2, 2]"),
}
"""Range of each numeric field of SamplingParams: a check, and its description for errors."""


def require_in_range(name: str, value: object) -> float:
    """Return `value`, of the field `name` of NUMBERS, as a float; RequestError if it is outside its
    range, or no number."""
    fits, expected = NUMBERS[name]
    given = require_number(name, value, RequestError)
    if not fits(given):
        raise RequestError(f"{name}: expected {expected}, got {given}")
    return given


def require_suggested(fields: Mapping[str, object]) -> None:
    """Raise RequestError unless a request can have `fields`, which `suggested` returned."""
    for name, value in fields.items():
        if name in NUMBERS:
            require_in_range(name, value)
        else:
            require_integer(name, value, RequestError, least=0)


def suggested(config: Mapping[str, object]) -> JsonObject:
    """Fields of SamplingParams that `config` sets. Without `do_sample` the text is greedy, at any
    temperature; with `do_sample` the temperature's default is 1."""
    if not config.get("do_sample"):
        return _with_effect(config, GREEDY_TOO)
    temperature = config.get("temperature")
    found = {
        "temperature": 1.0 if temperature is None else temperature,
        **_with_effect(config, GREEDY_TOO | SAMPLED),
    }
    top_k = found.get("top_k")
    if top_k == -1:  # in vLLM: all tokens
        del found["top_k"]
    elif isinstance(top_k, float) and top_k.is_integer():
        found["top_k"] = int(top_k)
    return found


def _with_effect(config: Mapping[str, object], plain: Mapping[str, object]) -> JsonObject:
    return {
        name: config[name]
        for name, value in plain.items()
        if config.get(name) is not None and config[name] != value
    }
