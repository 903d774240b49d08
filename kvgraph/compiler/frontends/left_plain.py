"""Which layers a checkpoint in fewer bits leaves as they were: by its tensors, or where these are
not at hand by the lists of its configuration.

Names are those of modules. What tools mean by an entry:

    compressed-tensors   `ignore`, and what no group has among its `targets`: a name, "re:" and a
                         pattern of a name's start, or a class (compressed_tensors.utils.match)
    modelopt             `ignore`, `exclude_modules`: a name with wildcards, or names within one;
                         of mixed precision: what is not in `quantized_layers`
    others               `modules_to_not_convert`, `ignored_layers`: names within a name, its end,
                         or a pattern; of GPTQ also what `dynamic` takes out ("-:") and what
                         `modules_in_block_to_quantize` leaves out
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase

from kvgraph.compiler.frontends.folder import Config, quantization

LANGUAGE_PARTS = ("language_model.", "text_model.")
"""What a larger model calls its language part, before or behind `model.`."""

CLASS = "Linear"
EXPERT = ("", ".gate_up_proj", ".0.gate_proj", ".0.up_proj", ".0.w1")
"""Behind the name of a layer of experts: names that one of its matrices has."""

Rule = Callable[[str], bool]
"""Whether a module of that name is left plain."""

_Rule = Callable[[list[str]], bool]
"""The same, of all the names that a module may have."""


def left_plain(config: Config, stored: Mapping[str, bool]) -> Rule:
    """Of linear layers. `stored`: weights whose tensors are at hand -> whether they are plain; that
    goes before what lists say."""
    return _by_names(config, stored, [""])


def left_plain_experts(config: Config, stored: Mapping[str, bool]) -> Rule:
    """Of layers of experts, by their own names and those of their first matrices."""
    return _by_names(config, stored, EXPERT)


def _by_names(config: Config, stored: Mapping[str, bool], ends: Sequence[str]) -> Rule:
    given = quantization(config) or {}
    if str(given.get("quant_method")).startswith("modelopt"):
        listed = _of_modelopt(given)
    elif given.get("config_groups") or given.get("quant_method") == "compressed-tensors":
        listed = _of_compressed_tensors(given)
    else:
        listed = _of_others(given)

    def rule(name: str) -> bool:
        names = [f"{spelling}{end}" for spelling in _spellings(name) for end in ends]
        weights = (weight for each in names for weight in (each, f"{each}.weight"))
        found = next((stored[weight] for weight in weights if weight in stored), None)
        return listed(names) if found is None else found

    return rule


def _spellings(name: str) -> Iterator[str]:
    """A name, and those that it has in a larger model."""
    yield name
    for part in LANGUAGE_PARTS:
        yield f"{part}{name}"
        if name.startswith("model."):
            yield f"model.{part}{name.removeprefix('model.')}"


def _of_compressed_tensors(given: Config) -> _Rule:
    ignored, targets = _texts(given.get("ignore")), list(_targets(given.get("config_groups")))

    def is_meant(entry: str, names: list[str]) -> bool:
        if entry.startswith("re:"):
            return _found(re.match, entry.removeprefix("re:"), names)
        return entry in (CLASS, *names)

    return lambda names: (
        any(is_meant(entry, names) for entry in ignored)
        or not any(is_meant(entry, names) for entry in targets)
    )


def _targets(groups: object) -> Iterator[str]:
    """Of all groups with weights; one that names none, or none at all, is of every linear layer."""
    for group in groups.values() if isinstance(groups, dict) and groups else [None]:
        if isinstance(group, dict) and not group.get("weights"):
            continue
        named = group.get("targets") if isinstance(group, dict) else group
        yield from _texts(named) or [CLASS]


def _of_modelopt(given: Config) -> _Rule:
    excluded = _texts(given.get("ignore")) + _texts(given.get("exclude_modules"))
    mixed = given.get("quantized_layers")
    return lambda names: (
        any(fnmatchcase(name, entry) for entry in excluded for name in names)
        or any(_is_within(re.escape(entry), names) for entry in excluded)
        or (isinstance(mixed, dict) and not any(name in mixed for name in names))
    )


def _of_others(given: Config) -> _Rule:
    kept = _texts(given.get("modules_to_not_convert")) + _texts(given.get("ignored_layers"))
    taken = _texts(given.get("modules_in_block_to_quantize"))
    rules = given.get("dynamic") or {}
    left = [pattern.removeprefix("-:") for pattern in rules if pattern.startswith("-:")]
    return lambda names: (
        any(_is_within(entry, names) or _end(names, entry) for entry in kept)
        or any(_found(re.match, pattern, names) for pattern in left)
        or (bool(taken) and not any(_end(names, entry) for entry in taken))
    )


def _texts(found: object) -> list[str]:
    """Those in a list, or in lists within."""
    if isinstance(found, str):
        return [found]
    return [text for each in found for text in _texts(each)] if isinstance(found, list) else []


def _end(names: list[str], end: str) -> bool:
    return any(name.endswith(end) for name in names)


def _is_within(pattern: str, names: list[str]) -> bool:
    """Whether it is whole parts of a name: "gate" is none of "mlp.gate_proj"."""
    return _found(re.search, rf"(?:^|\.)(?:{pattern})(?:\.|$)", names)


def _found(how: Callable[[str, str], object], pattern: str, names: list[str]) -> bool:
    try:
        return any(how(pattern, name) for name in names)
    except re.error:  # of a list that no reader of weights looks into
        return False
