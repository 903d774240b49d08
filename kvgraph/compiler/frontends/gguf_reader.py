"""Read the header of a GGUF file with the gguf package, and stop where the file ends.

Import this module where the package is known to be there.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from gguf import GGUFReader

from kvgraph.contract.dims import Array


class Reader(GGUFReader):  # type: ignore[misc]
    """The package's reader of the file `path`. ValueError or FloatingPointError, among others, for
    a damaged file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with np.errstate(over="raise"):  # of an offset that wraps to another place of the file
            super().__init__(path)

    def _get(
        self, offset: int, dtype: object, count: int = 1, override_order: object = None
    ) -> Array:
        """The package's own returns what is left of the file, then goes on with nothing for ever
        if a list says that it is longer."""
        found: Array = super()._get(offset, dtype, count, override_order)
        if len(found) < count:
            raise ValueError(f"expected {count} elements at byte {offset}, got {len(found)}")
        return found
