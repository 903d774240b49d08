"""Tensors that a quantised weight is stored as."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from kvgraph.compiler.shards import Stored
from kvgraph.compiler.values import Plain
from kvgraph.errors import ModelError, UnsupportedError

EXPONENT_BIAS = 127
"""Of a scale that is an exponent alone (E8M0); the largest byte is a NaN."""

LEFT = tuple(
    f".{name}"
    for name in (
        "input_scale",
        "input_zero_point",
        "input_global_scale",
        "k_scale",
        "v_scale",
        "q_scale",
    )
)
"""Ends of names: of activations, which are scaled as they come, and of a cache, which has its own
dtype."""

INSTEAD = "compile the checkpoint that it was made from, with --weights int4 or int8"


@dataclass
class Parts:
    """The stored tensors of a checkpoint, and which of them are parts of a weight."""

    folder: Path
    method: str
    stored: Mapping[str, Stored]
    unread: Mapping[str, str] = field(default_factory=dict)
    """Tensors of dtypes that are not read -> their dtype."""
    taken: set[str] = field(default_factory=set)
    kinds: set[str] = field(default_factory=set)
    """How weights are stored, as words for a user."""

    @property
    def said(self) -> str:
        return ", ".join([self.method, *sorted(self.kinds)])

    def stems(self, suffix: str) -> Iterator[str]:
        """What stands before `suffix` in names of tensors, in order."""
        names = (name for name in sorted(self.stored) if name.endswith(suffix))
        return (name.removesuffix(suffix) for name in names)

    def find(self, name: str) -> Plain | None:
        """A part, if it is there."""
        if name not in self.stored:
            return None
        self.taken.add(name)
        return Plain(self.stored[name])

    def take(self, name: str, beside: str) -> Plain:
        found = self.find(name)
        if found is None and name in self.unread:
            raise self.refuse(name, "a dtype that is read", self.unread[name])
        if found is None:
            raise ModelError(
                f"{self.folder}: expected {name} beside {beside}, as {self.method} stores a "
                f"weight, got none: a damaged file, or a form that is not read; {INSTEAD}"
            )
        return found

    def find_index(self, name: str, inputs: int, count: int) -> Plain | None:
        """The group of each of the inputs, `count` groups in all, if it is there and filled."""
        found = self.find(name)
        if found is None:
            return None
        self.require_dtype(found, torch.int32, torch.int64)
        self.require_shape(found, [inputs])
        return found if _is_filled(found.read(), count) else None

    def require_shape(self, part: Plain, *shapes: Sequence[int]) -> None:
        """ModelError unless it has one of `shapes`."""
        if part.shape not in [tuple(shape) for shape in shapes]:
            wanted = " or ".join(str(list(shape)) for shape in dict.fromkeys(map(tuple, shapes)))
            raise ModelError(
                f"{part.where}: expected {wanted} from the tensors beside it, got "
                f"{list(part.shape)}: a damaged file, or a form that is not read; {INSTEAD}"
            )

    def require_dtype(self, part: Plain, *dtypes: torch.dtype) -> None:
        """UnsupportedError unless it is stored in one of `dtypes`."""
        if part.dtype not in dtypes:
            wanted = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
            raise self.refuse(part.stored.name, wanted, part.stored.dtype)

    def require_even_groups(
        self, scales: Plain, inputs: int, count: int, sizes: Collection[int]
    ) -> None:
        """ModelError unless `count` groups of a row are equal, and of one of `sizes` where there
        are any: a last group that is shorter would shift the others."""
        if count <= 1 or (inputs % count == 0 and (not sizes or inputs // count in sizes)):
            return
        of = " or ".join(map(str, sorted(sizes)))
        raise ModelError(
            f"{scales.where}: expected groups {f'of {of} ' if sizes else ''}that divide the "
            f"{inputs} inputs, got {count}; {INSTEAD}"
        )

    def require_matrix(self, part: Plain) -> tuple[int, int]:
        """Its shape. UnsupportedError for another number of dims."""
        if len(part.shape) != 2:
            raise self.refuse(part.stored.name, "a matrix", list(part.shape))
        return part.shape[0], part.shape[1]

    def refuse(self, what: str, expected: str, got: object) -> UnsupportedError:
        return UnsupportedError(
            f"{self.folder}: {self.method}: {what}: expected {expected}, got {got}; {INSTEAD}"
        )


def read_finite(part: Plain) -> torch.Tensor:
    """Scales in float32; bytes are exponents (E8M0). ModelError where one is not finite, or they
    are whole numbers."""
    stored = part.read()
    if stored.dtype != torch.uint8 and not stored.dtype.is_floating_point:
        raise ModelError(
            f"{part.where}: expected scales, floats or exponents, got {part.stored.dtype}"
        )
    if stored.dtype != torch.uint8:
        return require_finite(part, stored.float())
    powers = torch.exp2(stored.double() - EXPONENT_BIAS)
    powers[stored == 2 * EXPONENT_BIAS + 1] = torch.nan
    return require_finite(part, powers.float())


def require_finite(part: Plain, scales: torch.Tensor) -> torch.Tensor:
    if not scales.isfinite().all():
        at = [int(i) for i in (~scales.isfinite()).nonzero()[0]]
        raise ModelError(
            f"{part.where}{at}: expected a finite scale, got {float(scales[tuple(at)]):g}"
        )
    return scales


def group_of_inputs(index: Plain | None, inputs: int, count: int) -> torch.Tensor:
    """The group of each input: in order, or as `index` says.

    ModelError for a group that is not there.
    """
    if index is None:
        return torch.arange(inputs) // max(1, inputs // count)
    given = index.read().long()
    if not ((given >= 0) & (given < count)).all():
        raise ModelError(
            f"{index.where}: expected groups 0 to {count - 1}, got {int(given.min())} to "
            f"{int(given.max())}"
        )
    return given


def _is_filled(index: torch.Tensor, count: int) -> bool:
    """Whether it says anything: -1 alone does not, nor 0 alone where there are several groups."""
    return not ((index == -1).all() or (count > 1 and (index == 0).all()))


def unpack(words: torch.Tensor, bits: int) -> torch.Tensor:
    """`[..., n]` int32 words -> `[..., n * 32 / bits]` numbers of 0 up, the lowest bits first."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    found = (words.unsqueeze(-1) >> shifts) & ((1 << bits) - 1)
    return found.flatten(-2)
