"""Refuse layers, experts and sizes of a configuration that no tensor of its checkpoint has.

transformers makes a module of each layer, and memory for each weight: a number that is far too
large would fill the memory, or take hours.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from kvgraph.compiler.checkpoint_files import (
    CONFIG,
    INDEXES,
    read_index,
    shard_paths,
    stored_tensors,
)
from kvgraph.compiler.frontends.folder import Config
from kvgraph.compiler.frontends.routing import EXPERTS
from kvgraph.errors import ModelError

LAYERS = ("num_hidden_layers", "num_layers", "n_layer", "n_layers", "decoder_layers")
"""Configuration fields for the number of layers."""
SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "moe_intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
)
"""Configuration fields that are dims of weights, or divide one."""

NUMBER = re.compile(r"(?:^|\.)(\d+)\.")
EXPERT = re.compile(r"experts\.(\d+)\.")

MOST_MODULES, MOST_SIZE = 4096, 1 << 24
"""Most layers, or experts, and the largest size, if no weights are at hand. The largest known
models have 126 layers, 2,048 experts and sizes below 2**20."""
PACKED = 8
"""Most numbers in a stored word, by which a dim of packed weights may be shorter."""

NO_MEMORY = re.compile("allocate memory|Overflow when unpacking|Storage size calculation overflow")
"""torch's messages for a tensor that is too large."""


@dataclass(frozen=True)
class _Most:
    """The largest numbers that the tensors of a checkpoint allow; None: they do not say."""

    layers: int | None = None
    experts: int | None = None
    size: int | None = None


def require_counts(folder: Path, config: Config) -> None:
    """Raise ModelError for layers, experts or a size that the checkpoint in `folder` cannot have.

    Only headers are read. Damaged ones are left to those who read weights, and so are up to
    MOST_MODULES layers or experts: some models run a layer several times.
    """
    most = _most(_shapes(folder))
    text = config.get("text_config")
    for part in (config, text if isinstance(text, dict) else {}):
        path = f"{folder}/{CONFIG}"
        for names, stored, what in (
            (LAYERS, most.layers, "the layers of its weights"),
            (EXPERTS, most.experts, "the experts of its weights"),
        ):
            _require(path, part, names, stored, MOST_MODULES, what, spare=MOST_MODULES)
        allowed = None if most.size is None else PACKED * most.size
        _require(path, part, SIZES, allowed, MOST_SIZE, "as its largest weight allows")


def too_large(error: Exception, config: Mapping[str, object]) -> str:
    """The largest number of a configuration, by its name, if torch has no memory for a tensor of
    it; else empty."""
    numbers = {name: value for name, value in config.items() if type(value) is int}
    if not NO_MEMORY.search(str(error)) or not numbers:
        return ""
    name = max(numbers, key=numbers.__getitem__)
    return (
        f"{name}: expected a size for which there is memory, got {numbers[name]}; correct it, or "
        "take a machine with more memory"
    )


def _require(
    path: str,
    part: Config,
    names: Iterable[str],
    stored: int | None,
    usual: int,
    what: str,
    *,
    spare: int = 0,
) -> None:
    """`usual`: the most without weights. Up to `spare` pass even if the weights have fewer."""
    most = usual if stored is None else stored
    said = "without weights to compare it with" if stored is None else what
    for name in names:
        given = part.get(name)
        for each in given if isinstance(given, list) else [given]:
            if type(each) is int and each > max(most, spare):
                raise ModelError(
                    f"{path}: {name}: expected at most {most}, {said}, got {each}; correct it, or "
                    "download the checkpoint again"
                )


def _most(shapes: Mapping[str, tuple[int, ...]]) -> _Most:
    layers = [int(found[1]) + 1 for name in shapes if (found := NUMBER.search(name))]
    experts = list(_experts(shapes))
    sizes = [size for shape in shapes.values() for size in shape]
    return _Most(*(max(each, default=None) for each in (layers, experts, sizes)))


def _experts(shapes: Mapping[str, tuple[int, ...]]) -> Iterator[int]:
    """Experts that a tensor allows: its number and one, or the dims of several in one tensor."""
    for name, shape in shapes.items():
        if found := EXPERT.search(name):
            yield int(found[1]) + 1
        elif "expert" in name:
            yield from shape


def _shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Shapes of the stored tensors by name; empty shapes if an index alone is at hand."""
    with suppress(ModelError):
        if all(path.is_file() for path in shard_paths(folder)):
            found = stored_tensors(folder)
            if found:
                return {name: each.shape for name, each in found.items()}
        for name in INDEXES:
            if index := read_index(folder, name):
                return dict.fromkeys(index.shards, ())
    return {}
