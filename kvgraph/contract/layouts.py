"""The layout in a manifest, as the parameters of the cache that it describes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from kvgraph.contract.layout_fields import require_types

if TYPE_CHECKING:
    from kvgraph.contract.params import KVCacheParamInterface


def require_layout(where: str, layout: Mapping[str, object]) -> KVCacheParamInterface:
    """Parameters of the cache or tree of caches with this layout. Raises ValueError (ParamsError is
    one) for any other layout. `where` begins the messages about fields of wrong names or types."""
    from kvgraph.contract.trees import params_from_layout  # only readers of a manifest need it

    require_types(where, layout)
    return params_from_layout(layout)
