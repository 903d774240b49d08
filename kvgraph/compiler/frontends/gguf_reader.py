"""Read the header of a GGUF file with the gguf package, and stop where the file ends.

Import this module where the package is known to be there.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
from gguf import GGUFReader, GGUFValueType

from kvgraph.contract.dims import Array

Parts = list[Array | memoryview]


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

    def _get_field_parts(
        self, orig_offs: int, raw_type: int
    ) -> tuple[int, Parts, list[int], list[GGUFValueType]]:
        """The package's own makes 2 to 4 arrays for each entry of a list, which takes 10 seconds
        for a vocabulary of 300,000 texts. This one makes one part for a list of numbers, and one
        for each text."""
        if raw_type != GGUFValueType.ARRAY:
            return super()._get_field_parts(orig_offs, raw_type)  # type: ignore[no-any-return]
        kind = GGUFValueType(self._get(orig_offs, np.uint32)[0])
        count = int(self._get(orig_offs + 4, np.uint64)[0])
        parts: Parts
        if kind == GGUFValueType.STRING:
            parts = self._texts(orig_offs + 12, count)
            size = sum(8 + len(text) for text in parts)
        elif kind in self.gguf_scalar_to_np:
            parts = [self._get(orig_offs + 12, self.gguf_scalar_to_np[kind], count)]
            size = parts[0].nbytes
        else:
            return super()._get_field_parts(orig_offs, raw_type)  # type: ignore[no-any-return]
        return 12 + size, parts, [*range(len(parts))], [GGUFValueType.ARRAY, kind]

    def _texts(self, offset: int, count: int) -> Parts:
        """The bytes of `count` texts from `offset` on, where each follows its length."""
        data, order = memoryview(self.data), sys.byteorder
        if self.byte_order == "S":
            order = "big" if order == "little" else "little"
        texts: Parts = []
        for _ in range(count):
            first = offset + 8
            offset = first + int.from_bytes(data[first - 8 : first], order)
            if offset > len(data):
                raise ValueError(f"expected a text up to byte {offset}, got {len(data)} bytes")
            texts.append(data[first:offset])
        return texts
