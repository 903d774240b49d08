"""Checks of a manifest's values that need no class of a manifest. They raise ValueError."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence, Set
from typing import TYPE_CHECKING

from kvgraph.contract.plain import to_plain

if TYPE_CHECKING:
    from kvgraph.contract.params import KVCacheParams

NOT_PLAIN = re.compile(r"[\x00-\x1f\x7f-\x9f\ud800-\udfff]")
"""Control characters, and surrogates, which UTF-8 cannot encode: a manifest has neither."""


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
    """Raise ValueError for an integer of a record that is not in [0, 2**63)."""
    for index, record in enumerate(records):
        for key, value in to_plain(record).items():
            if isinstance(value, int) and not 0 <= value < 1 << 63:
                raise ValueError(f"{name}[{index}].{key}: expected 0 to 2**63 - 1, got {value}")


def require_plain_text(value: object) -> None:
    """Raise ValueError for text that controls a terminal, or that UTF-8 cannot encode."""
    if isinstance(value, str) and NOT_PLAIN.search(value):
        raise ValueError(f"expected text without control characters, in UTF-8, got {value!r:.100}")
    if isinstance(value, list | dict):
        for each in (*value, *value.values()) if isinstance(value, dict) else value:
            require_plain_text(each)
