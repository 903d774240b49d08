"""Reference logits whose routers choose as the artifact's do, where their scores decide nothing.

A router in 16 bits chooses another expert where two scores are nearly equal. All logits of that
token change, and its keys and values, so that later tokens of its row change too. Decision: the
check then takes the other expert in the reference, and compares again. A wrong graph stays wrong,
and no tokens are left out.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kvgraph.compiler.check.compare import (
    ROUTED_SHARE,
    Difference,
    Logits,
    Tokens,
    Tolerance,
    difference,
    errors_of,
)
from kvgraph.compiler.check.reference import reference_logits
from kvgraph.compiler.traced import Traced

MOST_OPTIONS = 8
"""Most choices of a token that are tried, the closest first. Each is one forward pass of a row."""

ROUNDED_ROUTES = (
    "its routers choose experts by rounded scores, and a compile in float32 shows whether that is "
    "the cause"
)


class Choice(NamedTuple):
    """The choice of a router for one token. `call`: the number of its `topk` in a forward pass."""

    call: int
    token: int


class _Routers(TorchDispatchMode):
    """Routers of a forward pass of one row while it is active.

    A router is a `topk` over the scores of each token. `changed`: choices whose last expert is the
    next best one. `close`: choices where the last score and the next best one differ by at most
    `error` of the spread of all, with that share.
    """

    def __init__(self, tokens: int, error: float, changed: Collection[Choice] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._tokens, self._error = tokens, error
        self._changed = changed
        self.count = 0
        self.close: dict[Choice, float] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if func is not torch.ops.aten.topk.default or kwargs or not self._is_router(*args):
            return func(*args, **(kwargs or {}))
        scores, k = args[:2]
        values, indices = func(scores, k + 1)
        flat = values.float().reshape(self._tokens, k + 1)
        finite = scores.float().reshape(self._tokens, -1)
        finite = torch.where(finite.isfinite(), finite, finite.new_tensor(torch.nan))
        mean = finite.nanmean(-1, keepdim=True)
        spread = (finite - mean).square().nanmean(-1).sqrt()
        gap = (flat[:, k - 1] - flat[:, k]) / spread
        for token in (gap <= self._error).nonzero().flatten().tolist():
            self.close[Choice(self.count, token)] = float(gap[token])
        kept = torch.arange(k).repeat(self._tokens, 1)
        for choice in self._changed:
            if choice.call == self.count:
                kept[choice.token, -1] = k
        self.count += 1
        kept = kept.reshape(*values.shape[:-1], k)
        return torch.return_types.topk((values.gather(-1, kept), indices.gather(-1, kept)))

    def closest(self, token: int, changed: Collection[Choice]) -> list[Choice]:
        """Close choices of a token that are not `changed`, the closest first."""
        own = [each for each in self.close if each.token == token and each not in changed]
        return sorted(own, key=self.close.__getitem__)[:MOST_OPTIONS]

    def _is_router(
        self, scores: torch.Tensor, k: int, dim: int = -1, largest: bool = True, _: bool = True
    ) -> bool:
        size = scores.shape[-1] if scores.dim() else 0
        is_last = dim in (-1, scores.dim() - 1)
        return is_last and largest and k < size and scores.numel() == self._tokens * size


def rerouted(
    traced: Traced, rows: Sequence[Tokens], found: Sequence[Logits], allowed: Tolerance
) -> tuple[list[Logits], bool]:
    """Reference logits with close choices made as in `found`, and whether there is a router.

    About the share of tokens that 16 bits change (ROUTED_SHARE) may get another choice.
    """
    pairs = [_row(traced, row, ours, allowed) for row, ours in zip(rows, found, strict=True)]
    return [logits for logits, _ in pairs], any(has_routers for _, has_routers in pairs)


def routed_difference(
    traced: Traced,
    rows: Sequence[Tokens],
    found: Sequence[Logits],
    expected: Sequence[Logits],
    allowed: Tolerance,
) -> Difference:
    """The difference to `expected`, or to the reference with close choices made as in `found`."""
    apart = difference(found, expected, allowed)
    if apart.fits:
        return apart
    return difference(found, rerouted(traced, rows, found, allowed)[0], allowed)


def _row(traced: Traced, row: Tokens, found: Logits, allowed: Tolerance) -> tuple[Logits, bool]:
    """The logits of one row, and whether there is a router.

    Tokens before the first one that exceeds the limit are near. So its own routers are the likely
    cause, and it gets the choice that brings it nearest.
    """

    def run(changed: Collection[Choice]) -> tuple[Logits, _Routers]:
        with _Routers(len(row), allowed.error, changed) as routers:
            (logits,) = reference_logits(traced, [row])
        return logits, routers

    changed: set[Choice] = set()
    logits, routers = run(changed)
    for _ in range(round((1 - ROUTED_SHARE) * len(row))):
        errors = errors_of(found, logits)
        over = np.flatnonzero(errors > allowed.error)
        if not len(over):
            break
        first = int(over[0])
        least = errors[first]
        for choice in routers.closest(first, changed):
            other, passed = run({*changed, choice})
            if (error := errors_of(found, other)[first]) < least:
                least, best = error, (choice, other, passed)
            if error <= allowed.error:
                break
        if least == errors[first]:
            break
        choice, logits, routers = best
        changed.add(choice)
    return logits, routers.count > 0
