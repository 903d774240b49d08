"""Run a kernel: blocks in batches, and warps at the same instruction in lock-step.

decode          each instruction once, into a function over all lanes of a batch
batch           as many blocks as fit, their warps as rows of one array
schedule        the threads at the lowest place go first, and join others that they reach
barrier         threads wait until all threads of their block have reached it
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvgraph.errors import KernelError, KernelFaultError
from kvgraph.ptx.counters import Counters
from kvgraph.ptx.memory import Memory
from kvgraph.ptx.parser import Kernel
from kvgraph.ptx.program import Operation, Program, program_of
from kvgraph.ptx.shared import Shared
from kvgraph.ptx.state import LANES, FaultError, Mask, State

BATCH_WARPS = 256
BATCH_BYTES = 64 << 20
"""Most warps, and most bytes of shared memory, of a batch."""

MOST_STEPS = 200_000_000
"""Most instructions of a batch; a kernel with more is assumed to run forever."""


def run(
    kernel: Kernel,
    memory: Memory,
    *,
    grid: tuple[int, int, int],
    threads: int,
    arguments: Sequence[int],
    shared: int = 0,
    order: int | None = None,
    checks: bool = True,
    profile: bool = False,
    blocks: Sequence[tuple[int, int, int]] | None = None,
) -> Counters:
    """Execute `grid` blocks of `threads` threads over `memory`, whose arrays it changes.

    `arguments`: one per parameter (addresses, integers, or the bits of floats). `shared`: bytes of
    dynamic shared memory. `order`: seed of a random order of warps between barriers; None: in step.
    `checks`: find races, and reads of bytes and registers that were never written. `profile`: count
    traffic and bank conflicts. `blocks`: blocks of the grid to run (None: all).

    KernelFaultError names a fault of the kernel and its place. KernelError: arguments or sizes that
    do not fit the kernel.
    """
    _require_launch(kernel, grid, threads, arguments)
    program = program_of(kernel)
    counters = Counters(profile)
    values = dict(zip((p.name for p in kernel.parameters), arguments, strict=True))
    size = kernel.shared + shared
    warps = threads // LANES
    at_once = max(1, min(BATCH_WARPS // warps, BATCH_BYTES // max(size, 1)))
    every = np.array(_blocks(grid) if blocks is None else blocks, np.uint32).reshape(-1, 3)
    turns = None if order is None else np.random.default_rng(order)
    with np.errstate(all="ignore"):
        for start in range(0, len(every), at_once):
            part = every[start : start + at_once]
            part_shared = Shared(len(part), size, program.granule, checks=checks)
            state = State(part, grid, warps, values, memory, part_shared, counters)
            _Batch(kernel, program, state, turns, checks).run()
    return counters


def _require_launch(
    kernel: Kernel, grid: tuple[int, int, int], threads: int, arguments: Sequence[int]
) -> None:
    if min(grid) < 1:
        raise KernelError(f"{kernel.name}: expected a grid of at least one block, got {grid}")
    if threads < LANES or threads % LANES or threads > 1024:
        raise KernelError(f"{kernel.name}: expected whole warps of threads, got {threads}")
    if kernel.threads is not None and kernel.threads != threads:
        raise KernelError(
            f"{kernel.name}: expected {kernel.threads} threads (.reqntid), got {threads}"
        )
    if len(arguments) != len(kernel.parameters):
        raise KernelError(
            f"{kernel.name}: expected {len(kernel.parameters)} arguments, got {len(arguments)}"
        )


def _blocks(grid: tuple[int, int, int]) -> list[tuple[int, int, int]]:
    x, y, z = grid
    return [(i, j, k) for k in range(z) for j in range(y) for i in range(x)]


# ---- running


class _Batch:
    """Blocks that run together until all their threads have ended."""

    def __init__(
        self,
        kernel: Kernel,
        program: Program,
        state: State,
        turns: np.random.Generator | None,
        checks: bool,
    ) -> None:
        self._kernel = kernel
        self._program = program
        self._state = state
        self._turns = turns
        self._doubtful = program.doubtful if checks else frozenset[int]()
        for kind in program.kinds:
            fill = np.array(0x55, np.uint8).astype(kind)
            state.registers.append(np.broadcast_to(fill, state.shape))
        state.defined = {slot: np.zeros(state.shape, bool) for slot in self._doubtful}
        self._waiting: dict[tuple[int, int], npt.NDArray[np.bool_]] = {}
        """Waiting threads, by barrier and the place after it."""
        self._ended = np.zeros(state.shape, bool)
        self._steps = 0

    def run(self) -> None:
        turns = self._turns_of({0: np.ones(self._state.shape, bool)})
        while turns:
            for ready in turns:
                self._run(ready)
            turns = self._turns_of(self._released())
        self._require_copies_waited()

    def _turns_of(
        self, ready: dict[int, npt.NDArray[np.bool_]]
    ) -> list[dict[int, npt.NDArray[np.bool_]]]:
        """Split ready threads into turns: one turn, or a random order of each block's warps."""
        if not ready or self._turns is None:
            return [ready] if ready else []
        state, unit = self._state, self._program.unit
        count = -(-state.warps // unit)
        ranks = np.argsort(self._turns.random((state.num_blocks, count)), axis=1)
        rank = np.repeat(ranks, unit, 1)[:, : state.warps].reshape(-1, 1)
        turns = []
        for turn in range(count):
            part = {place: mask & (rank == turn) for place, mask in ready.items()}
            turns.append({place: mask for place, mask in part.items() if mask.any()})
        return [turn for turn in turns if turn]

    def _released(self) -> dict[int, npt.NDArray[np.bool_]]:
        """Release the threads of each block that has reached a barrier with all its threads."""
        state = self._state
        if not self._waiting:
            return {}
        by_block = (state.num_blocks, state.warps * LANES)
        ready: dict[int, npt.NDArray[np.bool_]] = {}
        for barrier in {barrier for barrier, _ in self._waiting}:
            there = np.zeros(state.shape, bool)
            for (other, _), mask in self._waiting.items():
                if other == barrier:
                    there |= mask
            full = there.reshape(by_block).all(1)
            state.epoch += full
            passes = np.repeat(full, state.warps)[:, None]
            for key in [key for key in self._waiting if key[0] == barrier]:
                mask = self._waiting.pop(key)
                if (mask & passes).any():
                    ready[key[1]] = ready.get(key[1], False) | (mask & passes)
                if (mask & ~passes).any():
                    self._waiting[key] = mask & ~passes
        if not ready:
            (_, place), mask = next(iter(self._waiting.items()))
            block = np.flatnonzero(mask.reshape(by_block).any(1))[0]
            there = sum(m.reshape(by_block)[block].sum() for m in self._waiting.values())
            raise self._fault(
                place - 1,
                FaultError(
                    f"expected all {by_block[1]} threads of the block at one barrier, got {there} "
                    "that wait",
                    mask,
                ),
                mask,
            )
        return ready

    def _run(self, ready: dict[int, npt.NDArray[np.bool_]]) -> None:
        """Run until every thread of `ready` waits or has ended."""
        everyone = self._state.shape[0] * LANES
        while ready:
            place = min(ready)
            lanes = ready.pop(place)
            mask: Mask = None if np.count_nonzero(lanes) == everyone else lanes
            self._straight(place, mask, ready)

    def _straight(self, place: int, mask: Mask, ready: dict[int, npt.NDArray[np.bool_]]) -> None:
        """Run from `place` on, until another group must go first, or these threads wait or end."""
        state, operations = self._state, self._program.operations
        counts = state.counters.instructions
        registers = state.registers
        warps = state.shape[0] if mask is None else int(mask.any(1).sum())
        while place < len(operations):
            if ready:
                if min(ready) < place:
                    ready[place] = state.active(mask) | ready.get(place, False)
                    return
                if place in ready:
                    mask = self._whole(state.active(mask) | ready.pop(place))
                    warps = state.shape[0] if mask is None else int(mask.any(1).sum())
            op = operations[place]
            self._steps += 1
            counts[op.family] += warps
            taken = mask
            if op.guard >= 0:
                if self._doubtful:
                    self._require_defined(frozenset([op.guard]), place, mask)
                found = registers[op.guard]
                found = ~found if op.said.negated else found
                taken = self._whole(found if mask is None else found & mask)
                if taken is not None and not taken.any():
                    place += 1
                    continue
            if op.step is not None:
                if self._doubtful:
                    self._require_defined(op.reads, place, taken)
                try:
                    op.step(state, taken)
                except FaultError as fault:
                    raise self._fault(place, fault, taken) from None
                except (LookupError, ValueError, TypeError, ArithmeticError) as error:
                    said = f"expected operands of the instruction's types, got others ({error})"
                    raise self._fault(place, FaultError(said), taken) from error
                if self._doubtful:
                    self._define(op, taken)
                place += 1
                continue
            if self._steps > MOST_STEPS:
                raise self._fault(
                    place, FaultError("expected an end, got a loop without one"), mask
                )
            if op.kind == "bra" and taken is mask:
                place = op.target
                continue
            place = self._parted(op, place, mask, taken, ready)
            if place < 0:
                return
            raise AssertionError("control flow goes on in `ready`")
        raise self._fault(place - 1, FaultError("expected ret, got the end of the code"), mask)

    def _parted(
        self,
        op: Operation,
        place: int,
        mask: Mask,
        taken: Mask,
        ready: dict[int, npt.NDArray[np.bool_]],
    ) -> int:
        """Record the threads that branch, wait or end, and the rest at the next place. Returns
        -1."""
        state = self._state
        there = state.active(taken)
        rest = state.active(mask) & ~there
        if rest.any():
            ready[place + 1] = rest | ready.get(place + 1, False)
        if op.kind == "bra":
            ready[op.target] = there | ready.get(op.target, False)
        elif op.kind == "bar":
            key = op.target, place + 1
            self._waiting[key] = there | self._waiting.get(key, False)
        else:
            self._ended |= there
        return -1

    @staticmethod
    def _whole(mask: npt.NDArray[np.bool_]) -> Mask:
        return None if mask.all() else mask

    def _require_defined(self, reads: frozenset[int], place: int, mask: Mask) -> None:
        state = self._state
        for slot in reads & self._doubtful:
            bad = state.active(mask) & ~state.defined[slot]
            if bad.any():
                name = list(self._kernel.registers)[slot]
                said = f"expected a value in {name}, got a register that was not written"
                raise self._fault(place, FaultError(said, bad), mask)

    def _define(self, op: Operation, mask: Mask) -> None:
        for slot in op.writes & self._doubtful:
            self._state.defined[slot] |= self._state.active(mask)

    def _require_copies_waited(self) -> None:
        """Raise if a copy was never waited for: it could write to the memory of the next block."""
        if self._state.copies.issued and self._state.shared.checks:
            raise KernelFaultError(
                f"{self._kernel.name}: expected a wait for every asynchronous copy, got "
                f"{len(self._state.copies.issued)} without one at the end"
            )

    def _fault(self, place: int, fault: FaultError, mask: Mask) -> KernelFaultError:
        """The KernelFaultError with the instruction, its line, and the first thread concerned."""
        state, said = self._state, self._program.operations[place].said
        lanes = state.active(mask) if fault.lanes is None else fault.lanes
        row, lane = np.argwhere(lanes)[0] if lanes.any() else (0, 0)
        block = tuple(int(x) for x in state.blocks[row // state.warps])
        thread = int(state.thread[row, lane])
        text = said.text if len(said.text) <= 120 else said.text[:117] + "..."
        return KernelFaultError(
            f"{self._kernel.name}, line {said.line}, block {block}, thread {thread}: "
            f"{fault} ({text})"
        )
