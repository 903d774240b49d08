"""Find the layers that a quantised checkpoint leaves plain, by the lists of its configuration: for
plans of checkpoints whose tensors are not at hand.

Names are those of modules. Entries of the lists mean:

    compressed-tensors   `ignore`, and modules in no group's `targets`: a name, "re:" and a pattern
                         for the start of a name, or a class (compressed_tensors.utils.match)
    modelopt             `ignore`, `exclude_modules`: a name with wildcards, or parts of a name;
                         with mixed precision: modules that are not in `quantized_layers`
    others               `modules_to_not_convert`, `ignored_layers`: parts of a name, the end of a
                         name, or a pattern; with GPTQ also patterns of `dynamic` with "-:", and
                         modules that `modules_in_block_to_quantize` leaves out
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from fnmatch import fnmatchcase

from kvgraph.compiler.frontends.folder import Config, quantization

LANGUAGE_PARTS = ("language_model.", "text_model.")
"""Prefixes of the language part's names in a larger model, before or after `model.`."""

CLASS = "Linear"
EXPERT = {
    "gate_up_proj": ("", ".gate_up_proj", ".0.gate_proj", ".0.up_proj", ".0.w1", ".0.w3"),
    "down_proj": ("", ".down_proj", ".0.down_proj", ".0.w2"),
}
"""Matrix of a layer of experts -> suffixes that make its names, or those of the first expert's part
of it, of the name of the layer."""

Group = Config | list[object]
"""A group of compressed-tensors: what it says, or the targets of a scheme that its name gives."""

Rule = Callable[[str], bool]
"""`rule(name)`: whether the module of that name is left plain."""

_Rule = Callable[[list[str]], bool]
"""`rule(names)`: whether a module that may have any of these names is left plain."""


def left_plain(config: Config, ends: Sequence[str] = ("",)) -> Rule:
    """The rule for modules of a name with one of `ends`: linear layers or, with those of EXPERT, a
    matrix of a layer of experts."""
    given = quantization(config) or {}
    if str(given.get("quant_method")).startswith("modelopt"):
        listed = _of_modelopt(given)
    elif given.get("config_groups") or given.get("quant_method") == "compressed-tensors":
        listed = _of_compressed_tensors(given)
    else:
        listed = _of_others(given)

    return lambda name: listed([f"{each}{end}" for each in spellings(name) for end in ends])


def spellings(name: str) -> Iterator[str]:
    """A name itself, and the names that it may have in a larger model."""
    yield name
    for part in LANGUAGE_PARTS:
        yield f"{part}{name}"
        if name.startswith("model."):
            yield f"model.{part}{name.removeprefix('model.')}"


def _of_compressed_tensors(given: Config) -> _Rule:
    ignored = _texts(given.get("ignore"))
    groups = [targets for _, _, targets in _groups(given)]
    targets = (
        [entry for each in groups for entry in each] if given.get("config_groups") else [CLASS]
    )
    return lambda names: (
        any(_is_meant(entry, names, [CLASS]) for entry in ignored)
        or not any(_is_meant(entry, names, [CLASS]) for entry in targets)
    )


def groups_for(given: Config, *names: str) -> list[tuple[str, Group]]:
    """The groups of compressed-tensors, with their names, that may quantise a layer with one of
    `names`: those that name it or, if there are none, all. One may be for its class, or name it as
    a model does that is saved under other names."""
    stems = [stem for name in names for stem in _without_parts(name)]
    names = tuple(spelling for stem in stems for spelling in spellings(stem))
    groups = list(_groups(given))
    found = [
        (key, group)
        for key, group, targets in groups
        if any(_is_meant(entry, names, ()) for entry in targets)
    ]
    return found or [(key, group) for key, group, _ in groups]


def _without_parts(name: str) -> Iterator[str]:
    """`name`, and the name that it has in its language part alone."""
    yield name
    for part in LANGUAGE_PARTS:
        for prefix in (part, f"model.{part}"):
            if name.startswith(prefix):
                stem = name.removeprefix(prefix)
                yield stem if stem.startswith("model.") else f"model.{stem}"


def _is_meant(entry: str, names: Sequence[str], classes: Sequence[str]) -> bool:
    if entry.startswith("re:"):
        return _found(re.match, entry.removeprefix("re:"), names)
    return entry in (*classes, *names)


def _groups(given: Config) -> Iterator[tuple[str, Group, list[str]]]:
    """Name, content and targets of each group with weights."""
    for name, group in (given.get("config_groups") or {}).items():
        if isinstance(group, list) or group.get("weights"):
            yield name, group, targets_of(group)


def targets_of(group: Group) -> list[str]:
    """What a group is for. One without targets means every linear layer."""
    return _texts(group if isinstance(group, list) else group.get("targets")) or [CLASS]


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
    """The strings in a nested list; a single string counts as a list of one."""
    if isinstance(found, str):
        return [found]
    return [text for each in found for text in _texts(each)] if isinstance(found, list) else []


def _end(names: list[str], end: str) -> bool:
    return any(name.endswith(end) for name in names)


def _is_within(pattern: str, names: list[str]) -> bool:
    """Whether `pattern` matches whole parts of a name: "gate" does not match "mlp.gate_proj"."""
    return _found(re.search, rf"(?:^|\.)(?:{pattern})(?:\.|$)", names)


def is_start(pattern: str, name: str) -> bool:
    """Whether `pattern` matches the start of a layer's name."""
    return _found(re.match, pattern, [name])


def _found(how: Callable[[str, str], object], pattern: str, names: Sequence[str]) -> bool:
    try:
        return any(how(pattern, name) for name in names)
    except re.error:  # entries of these lists are not checked when the configuration is read
        return False
