"""State of a running batch of blocks: registers, threads and memories; and the error of a step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from kvgraph.contract.dims import Array
from kvgraph.ptx.counters import Counters
from kvgraph.ptx.memory import Memory
from kvgraph.ptx.shared import Shared

Lanes: TypeAlias = Array
"""A value of each thread, `[warps, 32]`, or a value that broadcasts to this shape."""

Mask: TypeAlias = npt.NDArray[np.bool_] | None
"""Threads that take a step, `[warps, 32]`; None: all threads of the batch."""

Step: TypeAlias = Callable[["State", Mask], None]

LANES = 32


class FaultError(Exception):
    """An error that a step found. `lanes`: its threads, if they are known."""

    def __init__(self, sentence: str, lanes: npt.NDArray[np.bool_] | None = None) -> None:
        super().__init__(sentence)
        self.lanes = lanes


class State:
    """State of `[warps, 32]` threads of several blocks; the warps of a block are contiguous."""

    def __init__(
        self,
        blocks: npt.NDArray[np.uint32],
        grid: tuple[int, int, int],
        warps: int,
        arguments: dict[str, int],
        memory: Memory,
        shared: Shared,
        counters: Counters,
    ) -> None:
        self.shape = (len(blocks) * warps, LANES)
        self.warps = warps
        self.num_blocks = len(blocks)
        self.blocks = blocks
        self.grid = grid
        self.arguments = arguments
        self.memory = memory
        self.shared = shared
        self.counters = counters
        self.registers: list[Lanes] = []
        self.defined: dict[int, npt.NDArray[np.bool_]] = {}
        lanes = np.arange(LANES, dtype=np.uint32)
        warp = np.tile(np.arange(warps, dtype=np.uint32), len(blocks))
        self.warp = warp[:, None]
        self.block = np.repeat(np.arange(len(blocks)), warps)[:, None]
        self.lane = np.broadcast_to(lanes, self.shape)
        self.thread = self.warp * np.uint32(LANES) + lanes
        self.epoch = np.zeros(len(blocks), np.int64)
        self.copies = Copies(self.shape)
        self.groups = Groups(self.shape[0])

    def code(self) -> npt.NDArray[np.int64]:
        """Code of each warp now, `[warps, 1]`: 64 * epoch of the block + number in the block."""
        return self.epoch[self.block] * 64 + self.warp

    def special(self, name: str) -> Lanes | None:
        """Value of a special register such as %tid.x (PTX ISA 10); None if it is not modelled."""
        register, _, axis = name.removeprefix("%").partition(".")
        at = "xyz".find(axis) if axis else -1
        if register == "laneid":
            return self.lane
        if at < 0:
            return None
        if register == "tid":
            return self.thread if at == 0 else np.zeros(self.shape, np.uint32)
        if register == "ntid":
            return np.array(self.warps * LANES if at == 0 else 1, np.uint32)
        if register == "nctaid":
            return np.array(self.grid[at], np.uint32)
        if register == "ctaid":
            return np.broadcast_to(np.repeat(self.blocks[:, at], self.warps)[:, None], self.shape)
        return None

    def active(self, mask: Mask) -> npt.NDArray[np.bool_]:
        return np.ones(self.shape, bool) if mask is None else mask


class Copies:
    """Asynchronous copies of each thread (cp.async) that were issued and have not arrived yet."""

    def __init__(self, shape: tuple[int, int]) -> None:
        self.committed = np.zeros(shape, np.int64)
        """Number of groups that each thread has committed."""
        self.issued: list[tuple[Lanes, Lanes, Lanes, Lanes]] = []
        """Copies: flat threads, their groups, places in shared memory, bytes `[threads, size]`."""


@dataclass(frozen=True, slots=True)
class Issued:
    """A product of the four warps from `warp` on: its group, its registers, and the granules that
    it reads."""

    warp: int
    group: int
    slots: tuple[int, ...]
    granules: npt.NDArray[np.int64]


class Groups:
    """Asynchronous matrix products of each warp (wgmma) that were not waited for yet."""

    def __init__(self, warps: int) -> None:
        self.committed = np.zeros(warps, np.int64)
        self.issued: list[Issued] = []
        self.locked: dict[int, npt.NDArray[np.bool_]] = {}
        """Warps in which a running product uses a register, by register."""
        self.unfenced: dict[int, npt.NDArray[np.bool_]] = {}
        """Warps that wrote a register since their last wgmma.fence, by register."""
