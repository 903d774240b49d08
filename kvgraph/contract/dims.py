"""Names of the symbolic dims, and TensorType: one typed placeholder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

import numpy.typing as npt

from kvgraph.contract.devices import LogicalDevice
from kvgraph.contract.values import require_integer
from kvgraph.errors import BindingError

BATCH_SIZE = "batch_size"
TOTAL_SEQ_LEN = "total_seq_len"
NUM_LOGITS = "num_logits"
NUM_PAGE_SLOTS = "num_page_slots"
MAX_NUM_PAGES = "max_num_pages"
NUM_STEPS = "num_steps"
NUM_SLOTS = "num_slots"
MAX_SEQ_LEN = "max_seq_len"
ROW_OFFSETS = "batch_size + 1"
"""The one derived dim: `input_row_offsets` has one entry more than the batch has rows."""

Array: TypeAlias = npt.NDArray[Any]
"""A host array, of the dtype of its symbol or operand."""

Dim = int | str
"""An integer is static; a string is a symbol that a runtime value resolves."""


def ceildiv(a: int, b: int) -> int:
    """Smallest integer >= a / b."""
    return -(-a // b)


def split_dim(dim: Dim) -> tuple[str, int]:
    """Symbol and offset of a dim: "batch_size + 1" gives ("batch_size", 1), 4 gives ("", 4)."""
    if isinstance(dim, int):
        return "", dim
    symbol, _, offset = dim.partition(" + ")
    return symbol, int(offset or 0)


@dataclass(frozen=True, slots=True)
class TensorType:
    """A typed placeholder: name, dtype, dims and logical device of one graph input or output.

    `kind` is "tensor", or "buffer" for memory that ops mutate in place: one address is bound to
    the input and to the output of that name.
    """

    name: str
    dtype: str
    shape: tuple[Dim, ...]
    device: LogicalDevice
    kind: Literal["tensor", "buffer"] = "tensor"

    def __str__(self) -> str:
        kind = " (buffer)" if self.kind == "buffer" else ""
        return f"{self.name} {self.dtype} {list(self.shape)} on {self.device}{kind}"

    @property
    def rank(self) -> int:
        return len(self.shape)

    @property
    def symbolic_dims(self) -> tuple[str, ...]:
        """Names of the symbolic dims in order, each once; `batch_size + 1` counts as
        `batch_size`."""
        names = (split_dim(dim)[0] for dim in self.shape if isinstance(dim, str))
        return tuple(dict.fromkeys(names))

    def renamed(self, name: str) -> TensorType:
        return replace(self, name=name)

    def extents(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """Concrete shape under `sizes` (symbol -> extent). BindingError names a symbol that has no
        extent, or one that is no integer >= 0."""
        return tuple(d if isinstance(d, int) else self._resolve(d, sizes) for d in self.shape)

    def _resolve(self, dim: str, sizes: Mapping[str, int]) -> int:
        symbol, offset = split_dim(dim)
        if symbol not in sizes:
            raise BindingError(
                f"{self.name}: expected an extent for dim {symbol!r}, got only {sorted(sizes)}"
            )
        extent = sizes[symbol]
        if type(extent) is not int or extent < 0:
            extent = require_integer(f"{self.name}: {symbol}", extent, BindingError, least=0)
        return extent + offset

    def bind(self, dtype: str, shape: tuple[int, ...], sizes: dict[str, int]) -> None:
        """Check a value's dtype and shape, and record its extents in `sizes`.

        Dims that `sizes` holds already must agree: one extent per dim over a whole signature.
        BindingError says which tensor and dim, and both values.
        """
        if dtype != self.dtype:
            raise BindingError(f"{self.name}: expected dtype {self.dtype}, got {dtype}")
        if len(shape) != self.rank:
            raise BindingError(
                f"{self.name}: expected rank {self.rank} {list(self.shape)}, "
                f"got shape {list(shape)}"
            )
        for axis, (dim, extent) in enumerate(zip(self.shape, shape, strict=True)):
            symbol, offset = split_dim(dim)
            own = sizes.setdefault(symbol, max(0, extent - offset)) if symbol else 0
            if own != extent - offset:
                raise BindingError(
                    f"{self.name}: dim {axis} ({dim}) expected {own + offset}, "
                    f"got {extent} in shape {list(shape)}"
                )
