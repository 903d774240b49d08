"""Checks of a manifest's values that need no class of a manifest. They raise ValueError."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence, Set
from typing import TYPE_CHECKING

from kvgraph.contract.dims import Dim, split_dim
from kvgraph.contract.plain import JsonObject, to_plain

if TYPE_CHECKING:
    from kvgraph.contract.params import KVCacheParams

NOT_PLAIN = re.compile(r"[\x00-\x1f\x7f-\x9f\ud800-\udfff]")
"""Control characters, and surrogates, which UTF-8 cannot encode: a manifest has neither."""

DIGEST = re.compile("[0-9a-f]{64}")
"""SHA-256 as hex."""

MOST = (1 << 31) - 1
"""The largest number of rows or tokens: graphs have them in int32."""


AT_LEAST_ONE = {
    ("mixtures", "layers"),
    ("mixtures", "experts"),
    ("mixtures", "parameters"),
    ("mixtures", "bytes"),
    ("executed", "steps"),
    ("collectives", "count"),
    ("collectives", "bytes"),
}
"""Records and their integers that are at least 1."""


def require_model(model: JsonObject) -> None:
    """Raise ValueError for sizes or token ids that no graph can have. End tokens beyond the
    vocabulary are plain: some checkpoints have them."""
    require_digest("model.identity", model["identity"])
    for name in ("vocab_size", "max_seq_len"):
        value = model[name]
        if value < 1:
            raise ValueError(f"model.{name}: expected >= 1, got {value}")
        if value > MOST:
            raise ValueError(f"model.{name}: expected <= {MOST}, got {value}")
    begin = [] if model["bos_token_id"] is None else [model["bos_token_id"]]
    for name, ids in (("eos_token_ids", model["eos_token_ids"]), ("bos_token_id", begin)):
        for value in ids:
            if not -MOST <= value <= MOST:
                raise ValueError(f"model.{name}: expected an id of 32 bits, got {value}")


def require_digest(where: str, value: object) -> None:
    """Raise ValueError unless `value` is SHA-256 as hex."""
    if not isinstance(value, str) or not DIGEST.fullmatch(value):
        raise ValueError(f"{where}: expected a SHA-256 of 64 hex digits, got {value!r}")


def require_profile(where: str, profile: JsonObject, dims: Set[Dim]) -> None:
    """Raise ValueError unless a profile has extents of each symbol in `dims`, in order."""
    wanted = {split_dim(dim)[0] for dim in dims} - {""}
    for name in ("min", "opt", "max"):
        for symbol in sorted(wanted - profile[name].keys()):
            raise ValueError(f"{where}.{name}: expected an extent of {symbol!r}, got none")
    for symbol in sorted(wanted):
        least, best, most = (profile[name][symbol] for name in ("min", "opt", "max"))
        if not 0 <= least <= best <= most <= MOST:
            raise ValueError(
                f"{where}: {symbol}: expected min <= opt <= max from 0 to {MOST}, got {least}, "
                f"{best} and {most}"
            )


def require_known(given: object, known: object, where: str = "") -> None:
    """Raise ValueError for a field of `given` that `known`, the same data as it was read, lacks."""
    if isinstance(given, dict) and isinstance(known, dict):
        for name, value in given.items():
            if name not in known:
                raise ValueError(f"{where}{name}: expected no field of this name, got one")
            require_known(value, known[name], f"{where}{name}.")
    elif isinstance(given, list) and isinstance(known, list):
        for index, (value, read) in enumerate(zip(given, known, strict=True)):
            require_known(value, read, f"{where.removesuffix('.')}[{index}].")


def require_layers(places: Set[tuple[str, int]], leaves: Mapping[str, KVCacheParams]) -> None:
    """Raise ValueError unless `places` (leaf, index) are the layers of the layout's `leaves`."""
    for path, index in sorted(places):
        if path not in leaves or not 0 <= index < leaves[path].num_layers:
            raise ValueError(f"layers: expected layers of the layout, got {path!r} {index}")
    for path, leaf in leaves.items():
        found = sum(place[0] == path for place in places)
        if found != leaf.num_layers:
            raise ValueError(
                f"layers: expected {leaf.num_layers} places in cache {path!r} from the layout, "
                f"got {found}"
            )


def require_counts(name: str, records: Sequence[object]) -> None:
    """Raise ValueError for an integer of a record that is not in [0, 2**63), or in [1, 2**63) where
    a record of none is not written."""
    for index, record in enumerate(records):
        for key, value in to_plain(record).items():
            least = 1 if (name, key) in AT_LEAST_ONE else 0
            if isinstance(value, int) and not least <= value < 1 << 63:
                raise ValueError(
                    f"{name}[{index}].{key}: expected {least} to 2**63 - 1, got {value}"
                )


def require_quality(quality: JsonObject) -> None:
    """Raise ValueError for figures that no text and model give."""
    if quality["tokens"] < 1:
        raise ValueError(f"quality.tokens: expected >= 1, got {quality['tokens']}")
    for name in ("perplexity", "reference_perplexity"):
        if not 0 < quality[name] < math.inf:
            raise ValueError(f"quality.{name}: expected a number > 0, got {quality[name]}")
    if not 0 <= quality["agreement"] <= 1:
        raise ValueError(f"quality.agreement: expected 0 to 1, got {quality['agreement']}")
    require_digest("quality.sha256", quality["sha256"])


def require_plain_text(value: object) -> None:
    """Raise ValueError for text that controls a terminal, or that UTF-8 cannot encode."""
    if isinstance(value, str) and NOT_PLAIN.search(value):
        raise ValueError(f"expected text without control characters, in UTF-8, got {value!r:.100}")
    if isinstance(value, list | dict):
        for each in (*value, *value.values()) if isinstance(value, dict) else value:
            require_plain_text(each)
