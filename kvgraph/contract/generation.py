"""How a checkpoint's authors sample its text: generation_config.json, as transformers reads it."""

from __future__ import annotations

from collections.abc import Mapping

from kvgraph.contract.plain import JsonObject

GENERATION = "generation_config.json"

GREEDY_TOO: dict[str, object] = {"repetition_penalty": 1}
SAMPLED: dict[str, object] = {"top_k": 0, "top_p": 1, "min_p": 0}
"""Fields that SamplingParams have too, and their value without effect."""


def suggested(config: Mapping[str, object]) -> JsonObject:
    """Fields of SamplingParams that `config` asks for. Without `do_sample` it asks for greedy text,
    whatever its temperature; with it the default is 1."""
    if not config.get("do_sample"):
        return _with_effect(config, GREEDY_TOO)
    temperature = config.get("temperature")
    return {
        "temperature": 1.0 if temperature is None else temperature,
        **_with_effect(config, GREEDY_TOO | SAMPLED),
    }


def _with_effect(config: Mapping[str, object], plain: Mapping[str, object]) -> JsonObject:
    return {
        name: config[name]
        for name, value in plain.items()
        if config.get(name) is not None and config[name] != value
    }
