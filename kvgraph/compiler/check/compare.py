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

    With packed weights a few tokens may exceed it: if a router chooses another expert, all logits
    of that token change.
    """

    error: float
    share: float


EXACT = Tolerance(1e-3, 1.0)
ROUNDED = {
    "float32": EXACT,
    "fp32": EXACT,
    "float16": Tolerance(0.05, 0.9),
    "bfloat16": Tolerance(0.2, 0.9),
    "bf16": Tolerance(0.2, 0.9),
    "stored": Tolerance(0.3, 0.8),
    "int8": Tolerance(0.3, 0.8),
    "float8_e4m3fn": Tolerance(0.3, 0.8),
    "int4": Tolerance(0.7, 0.7),
}

POOL_STEPS = 0.02
"""Error by numbers of a pool of fewer bits that are rounded to the next one."""


def tolerance(kinds: Collection[str]) -> Tolerance:
    """The tolerance for a model with activations, weights and pools of these kinds: the widest of
    them."""
    found = [ROUNDED[kind] for kind in kinds]
    return Tolerance(max(t.error for t in found), min(t.share for t in found))


def own_tolerance(activations: Collection[str], pools: Collection[str]) -> Tolerance:
    """The tolerance for a module against itself. Pools round a number alike in every batch, but a
    sum in another order changes few of their numbers."""
    error, share = tolerance(activations)
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
    def said(self) -> str:
        """The error, with as many digits as distinguish it from the limit."""
        texts = (f"{self.error:.{digits}g}" for digits in range(2, 17))
        return next((x for x in texts if float(x) > self.tolerance.error), str(self.error))


def difference(
    found: Sequence[Logits], expected: Sequence[Logits], allowed: Tolerance
) -> Difference:
    """The difference over all tokens of all rows.

    Logits that are not finite differ by infinity. Logits that are the same infinity in both, as
    with a mask over the vocabulary, are left out.
    """
    pairs = zip(found, expected, strict=True)
    errors = np.sort(np.concatenate([errors_of(ours, theirs) for ours, theirs in pairs]))
    at = int(np.ceil(allowed.share * len(errors))) - 1
    return Difference(float(errors[at]), allowed)


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
