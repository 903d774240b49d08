"""Counters of a run: instructions by family, global and shared memory, matrix products."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

SECTOR = 32
BANKS, BANK_BYTES = 32, 4


@dataclass
class Traffic:
    """Traffic of one buffer. `sectors`: 32-byte sectors that requests of warps touch. `ideal`: the
    fewest sectors that hold their distinct bytes."""

    requests: int = 0
    sectors: int = 0
    ideal: int = 0

    @property
    def bytes(self) -> int:
        return self.sectors * SECTOR


@dataclass
class Counters:
    """Counters of a run. `instructions`: executed by a warp, by family. `mma`: multiply-adds of
    matrix instructions. `wavefronts`: passes of shared memory for `shared_requests`, more than
    `ideal_wavefronts` if there are bank conflicts. Traffic and wavefronts need `profile`.
    """

    profile: bool = False
    instructions: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    mma: int = 0
    global_reads: dict[str, Traffic] = field(default_factory=lambda: defaultdict(Traffic))
    global_writes: dict[str, Traffic] = field(default_factory=lambda: defaultdict(Traffic))
    shared_requests: int = 0
    wavefronts: int = 0
    ideal_wavefronts: int = 0

    def global_access(
        self,
        traffic: Traffic,
        addresses: npt.NDArray[np.uint64],
        width: int,
        mask: npt.NDArray[np.bool_] | None,
    ) -> None:
        """Count the requests of warps, `addresses [warps, 32]`, of `width` bytes per thread."""
        far = np.iinfo(np.int64).max
        at = addresses.astype(np.int64)
        if mask is not None:
            at = np.where(mask, at, far)
        distinct = _distinct(at, far)
        traffic.requests += int((distinct > 0).sum())
        traffic.ideal += int((-(-distinct * width // SECTOR)).sum())
        traffic.sectors += int(_distinct(np.where(at == far, far, at // SECTOR), far).sum())

    def shared_access(
        self,
        addresses: npt.NDArray[np.int64],
        width: int,
        mask: npt.NDArray[np.bool_] | None,
    ) -> None:
        """Count requests, each served in parts of 128 bytes: 32, 16 or 8 threads at once."""
        words = max(width // BANK_BYTES, 1)
        at = addresses // BANK_BYTES
        if mask is not None:
            at = np.where(mask, at, -1)
        parts = at.reshape(-1, 32 // words)
        live = (parts >= 0).any(1)
        parts = parts[live]
        if not len(parts):
            return
        every = (parts[..., None] + np.arange(words)).reshape(len(parts), -1)
        every = np.where(np.repeat(parts >= 0, words, 1), every, -1)
        self.shared_requests += int((at >= 0).any(1).sum())
        self.wavefronts += int(_ways(every).sum())
        self.ideal_wavefronts += len(parts)


def _distinct(values: npt.NDArray[np.int64], nothing: int) -> npt.NDArray[np.int64]:
    """Number of distinct values of each row, without `nothing`, the largest value."""
    ordered = np.sort(values, axis=1)
    fresh = np.ones(ordered.shape, bool)
    fresh[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
    found: npt.NDArray[np.int64] = (fresh & (ordered != nothing)).sum(1)
    return found


def _ways(words: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Most distinct words in one bank, for each row."""
    ordered = np.sort(words, axis=1)
    fresh = ordered >= 0
    fresh[:, 1:] &= ordered[:, 1:] != ordered[:, :-1]
    rows = np.broadcast_to(np.arange(len(words))[:, None], words.shape)[fresh]
    counts = np.bincount(rows * BANKS + ordered[fresh] % BANKS, minlength=len(words) * BANKS)
    most: npt.NDArray[np.int64] = counts.reshape(len(words), BANKS).max(1)
    return most
