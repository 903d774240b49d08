"""Compare logits with the model's, within a tolerance that depends on the precision.

The error of a token is `|found - expected| / |expected - mean(expected)|` over its logits. The
limits come from measurements on correct compiles (`docs/results/check.md`): several times their
largest error, and far below that of a lost window or a wrong scale, which is about 1.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Logits = npt.NDArray[np.float32]
Tokens = npt.NDArray[np.int32]


class Tolerance(NamedTuple):
    """The largest error of a token, and the share of tokens that must keep to it.

    Weights or pools of 8 or 4 bits let a few tokens exceed it. So does a router, in any precision
    but float32: if it chooses another expert, all logits of that token change.
    """

    error: float
    share: float


EXACT = Tolerance(1e-3, 1.0)
ROUNDED = {
    "float32": EXACT,
    "fp32": EXACT,
    "float16": Tolerance(0.05, 1.0),
    "bfloat16": Tolerance(0.2, 1.0),
    "bf16": Tolerance(0.2, 1.0),
    "stored": Tolerance(0.3, 0.8),
    "int8": Tolerance(0.3, 0.8),
    "float8_e4m3fn": Tolerance(0.3, 0.8),
    "int4": Tolerance(0.7, 0.7),
}

ROUTED_SHARE = 0.9
"""Share of tokens whose routers choose the same experts after rounding to 16 bits."""

POOL_STEPS = 0.02
"""Error by numbers of a pool of fewer bits that are rounded to the next one."""


def tolerance(kinds: Collection[str], *, routed: bool = False) -> Tolerance:
    """The tolerance for a model with activations, weights and pools of these kinds: the widest of
    them. `routed`: the model has routers, or code that may choose as they do."""
    found = [ROUNDED[kind] for kind in kinds]
    error, share = max(t.error for t in found), min(t.share for t in found)
    is_exact = error == EXACT.error
    return Tolerance(error, min(share, ROUTED_SHARE) if routed and not is_exact else share)


def own_tolerance(activations: Collection[str], pools: Collection[str]) -> Tolerance:
    """The tolerance for a module against itself. Pools round a number alike in every batch, but a
    sum in another order changes few of their numbers."""
    error, share = tolerance(activations, routed=True)
    rounds = tolerance(pools) != EXACT
    return Tolerance(max(error, POOL_STEPS) if rounds else error, share)


class Difference(NamedTuple):
    """The error that `tolerance.share` of the tokens keep to, and the tolerance it is held to."""

    error: float
    tolerance: Tolerance

    @property
    def fits(self) -> bool:
        return self.error <= self.tolerance.error

    @property
    def text(self) -> str:
        """The error, with as many digits as distinguish it from the limit."""
        texts = (f"{self.error:.{digits}g}" for digits in range(2, 17))
        return next((x for x in texts if float(x) > self.tolerance.error), str(self.error))


def difference(
    found: Sequence[Logits], expected: Sequence[Logits], allowed: Tolerance
) -> Difference:
    """The difference over all tokens of all rows.

    Logits that are not finite differ by infinity. Logits that are the same infinity in both, as
    with a mask over the vocabulary, are left out. One token that is not finite where it is expected
    to be is enough, whatever the share.
    """
    pairs = list(zip(found, expected, strict=True))
    if any(np.any(~np.isfinite(ours) & np.isfinite(theirs)) for ours, theirs in pairs):
        return Difference(np.inf, allowed)
    errors = np.sort(np.concatenate([errors_of(ours, theirs) for ours, theirs in pairs]))
    at = int(np.ceil(allowed.share * len(errors))) - 1
    return Difference(float(errors[at]), allowed)


def step_difference(
    found: Sequence[Logits], expected: Sequence[Logits], allowed: Tolerance
) -> Difference:
    """The difference of the first row's last token alone, which is a step of its own in a check."""
    return difference([found[0][-1:]], [expected[0][-1:]], allowed)


def errors_of(found_TV: Logits, expected_TV: Logits) -> npt.NDArray[np.float64]:
    """`[T]`: the error of each token."""
    masked_TV = np.isinf(expected_TV) & (found_TV == expected_TV)
    count_T1 = np.maximum(np.sum(~masked_TV, -1, keepdims=True), 1)
    with np.errstate(invalid="ignore", over="ignore"):
        mean_T1 = np.sum(expected_TV, -1, keepdims=True, where=~masked_TV) / count_T1
        spread_TV = np.where(masked_TV, 0.0, expected_TV - mean_T1)
        scale_T = np.maximum(np.linalg.norm(spread_TV, axis=-1), 1e-30)
        apart_TV = np.where(masked_TV, 0.0, found_TV.astype(np.float64) - expected_TV)
        apart_T = np.linalg.norm(apart_TV, axis=-1)
    return np.where(np.isfinite(apart_T), apart_T / scale_T, np.inf)
