"""Helpers for readers of quantised weights: find, check and unpack the stored tensors."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

import torch

from kvgraph.compiler.checkpoint_files import StoredTensor, misplaced
from kvgraph.compiler.frontends.folder import Config
from kvgraph.compiler.frontends.found_instead import INSTEAD, UNREAD, damaged
from kvgraph.compiler.frontends.left_plain import is_start
from kvgraph.compiler.values import Plain, Rows, Values
from kvgraph.errors import ModelError, UnsupportedError

EXPONENT_BIAS = 127
"""Bias of a scale that is an exponent only (E8M0); the largest byte is a NaN."""

LEFT = (
    ".activation_scale",
    "_input_scale",
    ".input_scale_ub",
    *(
        f".{of}_{what}"
        for of in ("input", "output", "q", "k", "v")
        for what in ("scale", "zero_point", "global_scale")
    ),
)
"""Ends of names of tensors that are ignored: scales of activations, which are computed at run time,
and of a cache, which has its own dtype."""


def sizes_of_rules(config: Config) -> list[int]:
    """Group sizes that the rules of `dynamic` give to some layers; -1, whole rows, is left out."""
    rules = [rule for rule in (config.get("dynamic") or {}).values() if isinstance(rule, dict)]
    sizes = [rule.get("group_size") for rule in rules]
    return [size for size in sizes if isinstance(size, int) and size > 0]


def rule_for(config: Config, stem: str) -> Config:
    """The settings that `dynamic` gives to a layer; empty for a layer that it does not name."""
    rules = (config.get("dynamic") or {}).items()
    named = [rule for name, rule in rules if is_start(name.removeprefix("+:"), stem)]
    return next((rule for rule in named if isinstance(rule, dict)), {})


class Refused(Values):
    """A weight that cannot be read. `error` is raised for its shape, its dtype and its numbers.

    So the weights of layers that the model does not have refuse no checkpoint.
    """

    def __init__(self, where: str, error: ModelError | UnsupportedError) -> None:
        self.where, self._error = where, error

    def __getattr__(self, name: str) -> NoReturn:  # shape and dtype, which it never gets
        raise self._error

    def open(self) -> Rows:
        raise self._error


@dataclass
class Parts:
    """The stored tensors of a checkpoint. `taken`: names of those that were read as parts of a
    weight."""

    folder: Path
    method: str
    stored: Mapping[str, StoredTensor]
    unread: Mapping[str, str] = field(default_factory=dict)
    """Name of a tensor with a dtype that cannot be read -> that dtype."""
    shards: Mapping[str, str] = field(default_factory=dict)
    """Name of a tensor -> its shard by the index."""
    taken: set[str] = field(default_factory=set)
    kinds: set[str] = field(default_factory=set)
    """Texts that tell the user how weights are stored."""

    @property
    def text(self) -> str:
        return ", ".join([self.method, *sorted(self.kinds)])

    def stems(self, suffix: str) -> Iterator[str]:
        """Names of tensors that end with `suffix`, without it, in order."""
        names = (name for name in sorted(self.stored) if name.endswith(suffix))
        return (name.removesuffix(suffix) for name in names)

    def read(self, name: str, make: Callable[[], Values]) -> Values:
        """The values of the weight `name`, from `make`; a refused weight if it raises."""
        try:
            return make()
        except (ModelError, UnsupportedError) as error:
            return Refused(f"{self.folder}: {name}", error)

    def find(self, name: str) -> Plain | None:
        """The tensor `name`, marked as taken; None if it is not stored.

        ModelError if it has no elements, or only the index names it. UnsupportedError if its dtype
        cannot be read.
        """
        if name in self.unread:
            raise self.refuse(name, "a dtype that is read", self.unread[name])
        if name not in self.stored and name in self.shards:
            raise misplaced(self.folder, name)
        if name not in self.stored:
            return None
        self.taken.add(name)
        found = Plain(self.stored[name])
        if 0 in found.shape:
            raise damaged(found.where, "numbers", f"{list(found.shape)}: a damaged file")
        return found

    def take(self, name: str, beside: str) -> Plain:
        found = self.find(name)
        if found is None:
            wanted = f"{name} beside {beside}, as {self.method} stores a weight"
            raise damaged(str(self.folder), wanted, f"none{UNREAD}")
        return found

    def find_index(self, name: str, inputs: int, count: int) -> Plain | None:
        """The tensor `name` with the group of each input; None if it is missing or a placeholder.

        `count`: number of groups.
        """
        found = self.find(name)
        if found is None:
            return None
        self.require_dtype(found, torch.int32, torch.int64)
        self.require_shape(found, [inputs])
        return found if _is_filled(found.read(), count) else None

    def require_shape(self, part: Plain, *shapes: Sequence[int]) -> None:
        """Raise ModelError unless `part` has one of `shapes`."""
        if part.shape not in [tuple(shape) for shape in shapes]:
            wanted = " or ".join(str(list(shape)) for shape in dict.fromkeys(map(tuple, shapes)))
            wanted += " from the tensors beside it"
            raise damaged(part.where, wanted, f"{list(part.shape)}{UNREAD}")

    def require_dtype(self, part: Plain, *dtypes: torch.dtype) -> None:
        """Raise UnsupportedError unless `part` is stored in one of `dtypes`."""
        if part.dtype not in dtypes:
            wanted = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
            raise self.refuse(part.stored.name, wanted, part.stored.dtype)

    def require_even_groups(
        self, scales: Plain, inputs: int, count: int, sizes: Collection[int]
    ) -> None:
        """Raise ModelError unless `count` equal groups divide the inputs of a row.

        `sizes`: allowed group sizes; empty: any. A shorter last group would shift the others.
        """
        if count <= 1 or (inputs % count == 0 and (not sizes or inputs // count in sizes)):
            return
        of = " or ".join(map(str, sorted(sizes)))
        wanted = f"groups {f'of {of} ' if sizes else ''}that divide the {inputs} inputs"
        raise damaged(scales.where, wanted, count)

    def require_matrices(self, part: Plain) -> None:
        """Raise ModelError unless `part` is a matrix, or one for each expert."""
        if len(part.shape) not in (2, 3):
            got = f"{list(part.shape)}{UNREAD}"
            raise damaged(part.where, "a matrix, or one for each expert", got)

    def require_matrix(self, part: Plain) -> tuple[int, int]:
        """The shape of `part`. UnsupportedError unless it has two dims."""
        if len(part.shape) != 2:
            raise self.refuse(part.stored.name, "a matrix", list(part.shape))
        return part.shape[0], part.shape[1]

    def refuse(self, what: str, expected: str, got: object) -> UnsupportedError:
        return UnsupportedError(
            f"{self.folder}: {self.method}: {what}: expected {expected}, got {got}; {INSTEAD}"
        )


def read_finite(part: Plain) -> torch.Tensor:
    """Read scales in float32; bytes are exponents (E8M0).

    ModelError: a scale is not finite, or scales are integers of another type.
    """
    stored = part.read()
    if stored.dtype != torch.uint8 and not stored.dtype.is_floating_point:
        raise damaged(part.where, "scales, floats or exponents", part.stored.dtype)
    if stored.dtype != torch.uint8:
        return require_finite(part, stored.float())
    powers = (stored.int() << 23).view(torch.float32)
    powers[stored == 0] = 2.0**-EXPONENT_BIAS  # the bits of a zero
    powers[stored == 2 * EXPONENT_BIAS + 1] = torch.nan
    return require_finite(part, powers)


def require_finite(part: Plain, scales: torch.Tensor) -> torch.Tensor:
    if not scales.isfinite().all():
        at = [int(i) for i in (~scales.isfinite()).nonzero()[0]]
        got = f"{float(scales[tuple(at)]):g}"
        raise damaged(f"{part.where}{at or ''}", "a finite scale", got)
    return scales


def group_of_inputs(index: Plain | None, inputs: int, count: int) -> torch.Tensor:
    """The group of each input, `[inputs]`: from `index`, or in order if it is None.

    ModelError for a group number outside 0 to `count` - 1.
    """
    if index is None:
        return torch.arange(inputs) // max(1, inputs // count)
    given = index.read().long()
    if not ((given >= 0) & (given < count)).all():
        got = f"{int(given.min())} to {int(given.max())}"
        raise damaged(index.where, f"groups 0 to {count - 1}", got)
    return given


def _is_filled(index: torch.Tensor, count: int) -> bool:
    """Whether `index` was filled in: not if all are -1, or all are 0 with several groups."""
    return not ((index == -1).all() or (count > 1 and (index == 0).all()))


def unpack(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Unpack int32 words `[..., n]` to numbers `[..., n * 32 / bits]` from 0 up, the lowest bits
    first."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    found = (words.unsqueeze(-1) >> shifts) & ((1 << bits) - 1)
    return found.flatten(-2)


def group_size(inputs: int, count: int) -> int:
    """Inputs of each of `count` groups of a row. The last one may have fewer: of the sizes that are
    possible then, it is a multiple of 32 if there is one."""
    size = -(-inputs // count)
    whole = -(-size // 32) * 32
    return whole if inputs % size and -(-inputs // whole) == count else size
