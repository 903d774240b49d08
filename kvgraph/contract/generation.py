"""A checkpoint's default sampling: the fields of generation_config.json that set it.

A missing field has no effect, as in vLLM; transformers uses a top_k of 50 then.
"""

from __future__ import annotations

from collections.abc import Mapping

from kvgraph.contract.plain import JsonObject

GENERATION = "generation_config.json"

GREEDY_TOO: dict[str, object] = {"repetition_penalty": 1}
SAMPLED: dict[str, object] = {"top_k": 0, "top_p": 1, "min_p": 0}
"""Fields that SamplingParams have too, each with the value that has no effect."""


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
