"""Threads of a connector, and the state that they share with the step's thread.

    copier thread   device <-> host slots: loads that the host holds, then offloads
    store thread    look-ups, loads, writes below the host, touches, in this order; slow I/O waits
                    here, and a flush of the stores ends each series of writes

One condition guards all shared state; copies and I/O run without holding it.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from itertools import groupby, islice

import numpy as np

from kvgraph.contract.not_copyable import NotCopyable
from kvgraph.contract.threads import start_all
from kvgraph.kv.metrics import KVCacheMetrics
from kvgraph.kv.tiers.connector import Lookup, Move, Transfer
from kvgraph.kv.tiers.host import Bytes, HostStore, Slot
from kvgraph.kv.tiers.jobs import Job, run_jobs
from kvgraph.kv.tiers.store import PageStore, close_alive, close_all, held_by_each
from kvgraph.kv.tiers.uses import Uses

COPIES_AT_ONCE = 16
"""Most pages of one offload, so that a load waits for at most that many."""

WRITES_IN_A_ROW, BYTES_IN_A_ROW = 64, 16 << 20
"""Most writes, and most bytes of writes, before used keys are reported and stores flushed."""

GRACE_SECONDS, LEAST_RATE = 1.0, 64e6
"""Grace period of a load from below the host, and least bytes per second after it; a slower load
is ended, since computing would be faster."""

CLOSE_SECONDS = 10.0
"""Time for queued work when the tiers close; the rest is dropped."""

log = logging.getLogger("kvgraph.tiers")


class TierWorkers(NotCopyable):
    """Two threads, or none (`threads=False`: everything runs in `work`, for tests).

    - `stores`: every page is written to all; `sources` (bound prefixes) are only read, and first
    - `max_offloads`: most pages that wait to be copied out, a quarter of that if no slot is free;
      `max_writes`: most slots that wait for the stores; the rest is dropped and counted
    - `largest`: bytes of the largest record
    """

    def __init__(
        self,
        host: HostStore,
        stores: Sequence[PageStore] = (),
        sources: Sequence[PageStore] = (),
        *,
        largest: int,
        max_offloads: int,
        max_writes: int,
        threads: bool = True,
    ) -> None:
        self._host = host
        self._stores = stores
        self._below: Sequence[PageStore] = [*sources, *stores]
        self._bounce = np.empty(largest if self._below else 0, np.uint8)
        self._max_offloads, self._max_writes = max_offloads, max_writes
        # The step's thread takes the lock itself: a condition acquires and releases it in Python
        # code, where an interrupt could leave the lock held. Nor does it filter in a comprehension
        # while it holds it: Python 3.12 and 3.13 give no lock back if the interrupt comes there.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._copier = threading.Lock()  # one call of a copier at a time
        self._host_loads: deque[tuple[Transfer, list[Slot]]] = deque()
        self._offloads: deque[Move] = deque()
        self._lookups: list[Lookup] = []
        self._loads: deque[Transfer] = deque()
        self._writes: deque[Slot] = deque()
        self._touched = Uses()
        self._unflushed: dict[bytes, int] = {}  # bytes of the pages written since the last flush
        self._loading: set[Transfer] = set()  # a thread works on them
        self._writing: list[Slot] = []  # a thread works on them
        self._num_copying = 0
        self._ended: list[Transfer] = []
        self._news = False  # since the last `poll`
        self._is_starved = False  # offloads wait for slots
        self._to_clear = self._is_closing = False
        self._generation = 0  # of the tiers' content: raised by `reset`
        self._counts = KVCacheMetrics()
        self._read = self._written = 0  # pages, of the host tier
        self._process = os.getpid()
        takes = [self._take_copy, self._take_store] if self._below else [self._take_copy]
        self._threads = [
            threading.Thread(target=self._serve, args=(take,), name="kvgraph-tiers", daemon=True)
            for take in takes * threads
        ]
        self._num_serving = len(self._threads)
        weakref.finalize(self, close_alive, weakref.ref(self))  # as the interpreter ends
        try:
            start_all(self._threads)
        except BaseException:
            self._num_serving = len(self._threads)
            self.close()
            raise

    def close(self) -> None:
        self.abandon()
        # The garbage collector may run `close` in one of these threads; a fork has no threads.
        if self._process == os.getpid() and threading.current_thread() not in self._threads:
            end = time.monotonic() + CLOSE_SECONDS
            for thread in self._threads:
                thread.join(max(0.0, end - time.monotonic()))
                if thread.is_alive():
                    self.drop_queued()
                    thread.join()

    def drop_queued(self) -> None:
        with self._lock:
            writes = len(self._stores) * len(self._writes)
            dropped = len(self._offloads) + writes
            self._counts.offload_dropped += writes
            self._max_offloads = self._max_writes = 0
            self._drop_offloads()
            while self._writes:
                self._host.unpin(self._writes.popleft())
            for transfer in (*self._loads, *self._loading):
                transfer.is_cancelled = True
            self._changed.notify_all()
        if dropped:
            log.warning("the tiers end: %d copies of pages are dropped unwritten", dropped)

    def _give_up(self) -> None:
        """Close, because a thread finds no jobs any more; queued work ends as if it failed."""
        raise NotImplementedError

    def abandon(self) -> None:
        """Close without waiting: the last thread that ends closes the stores.

        A finaliser may call it in any thread, also within any call here. In a fork it does nothing.
        """
        if self._process != os.getpid():
            return
        with self._lock:  # re-entrant: this thread may hold it already
            self._is_closing = True
            self._changed.notify_all()
        if not self._threads:
            close_all(self._below)

    def _serve(self, take: Callable[[], Job | None]) -> None:
        try:
            run_jobs(partial(self._next, take), self._give_up)
        finally:
            with self._changed:
                self._num_serving -= 1
                is_last = not self._num_serving
                self._changed.notify_all()
            if is_last:
                close_all(self._below)

    def _next(self, take: Callable[[], Job | None]) -> Job | None:
        """Wait for the next job; None once the tiers close and all work is done."""
        with self._changed:
            while (job := take()) is None:
                if self._is_closing and not self._num_inflight():
                    return None
                self._changed.wait()
            return job

    def _num_inflight(self) -> int:
        """Number of loads, pages to copy out and pages to write, queued or running."""
        waiting = len(self._host_loads) + len(self._loads) + len(self._offloads) + len(self._writes)
        return waiting + len(self._loading) + self._num_copying + len(self._writing)

    def _end(self, transfer: Transfer) -> None:
        self._loading.discard(transfer)
        self._ended.append(transfer)
        self._tell()

    def _drop_offloads(self, keep: int = 0) -> None:
        """Drop and count queued offloads, except the first `keep`."""
        if rest := [self._offloads.pop() for _ in range(len(self._offloads) - keep)]:
            self._counts.offload_dropped += len(rest)
            self._end(Transfer(rest, is_load=False))

    def _tell(self) -> None:
        self._news = True
        self._changed.notify_all()

    def _pin(self, move: Move) -> Slot:
        slot = self._host.pin(move.key, move.pools.record_size)
        assert slot is not None, "asked under the same lock"
        return slot

    # -- copies

    def _take_copy(self) -> Job | None:
        if self._host_loads:
            transfer, slots = self._host_loads[0]
            job = partial(self._copy_in, transfer, slots)
            self._loading.add(transfer)
            self._host_loads.popleft()
            return job
        copies: list[tuple[Move, Slot | None]] = []
        job = partial(self._copy_out, copies, self._generation)
        self._reserve(copies)
        self._num_copying += len(copies)
        return job if copies else None

    def _reserve(self, copies: list[tuple[Move, Slot | None]]) -> None:
        """Add the next offloads, with a slot for each; None for a page that the host has by now."""
        try:
            for move in islice(self._offloads, COPIES_AT_ONCE):
                size = move.pools.record_size
                slot = self._host.reserve(move.key, size)
                if slot is None and not self._host.knows(move.key, size):
                    break
                copies.append((move, slot))
        except BaseException:  # they stay queued
            for slot in [slot for _, slot in copies if slot is not None]:
                self._host.abandon(slot)
            raise
        for _ in copies:
            self._offloads.popleft()
        was_starved, self._is_starved = self._is_starved, bool(self._offloads) and not copies
        if self._is_starved:
            self._drop_offloads(keep=max(1, self._max_offloads // 4))
            if not was_starved:
                self._changed.notify_all()  # `yield_pages` may wait for it

    def _copy_in(self, transfer: Transfer, slots: list[Slot]) -> None:
        try:
            self._copy(transfer.moves, [slot.data for slot in slots], is_load=True)
            transfer.landed = len(transfer.moves)
        finally:
            with self._changed:
                for slot in slots:
                    self._host.unpin(slot)
                if transfer.ok:
                    self._counts.h2d_blocks_copied += len(slots)
                    self._read += len(slots)
                self._end(transfer)

    def _copy_out(self, copies: list[tuple[Move, Slot | None]], generation: int) -> None:
        filled = [(move, slot) for move, slot in copies if slot is not None]
        ok = False
        try:
            self._copy([move for move, _ in filled], [s.data for _, s in filled], is_load=False)
            ok = True
        finally:
            with self._changed:
                self._num_copying -= len(copies)
                for _, slot in reversed(filled):  # a prefix's start becomes its youngest page
                    if ok and generation == self._generation:
                        self._keep(slot)
                    else:
                        self._host.abandon(slot)
                if not ok:
                    self._counts.offload_dropped += len(filled)
                self._end(Transfer([move for move, _ in copies], is_load=False))

    def _keep(self, slot: Slot) -> None:
        """Add a page from the device to the host tier, and queue it for the stores."""
        self._counts.d2h_blocks_copied += 1
        self._host.publish(slot)
        self._written += slot.is_held
        if self._stores and len(self._writes) < self._max_writes:
            self._writes.append(slot)
            return
        self._counts.offload_dropped += len(self._stores)
        self._host.unpin(slot)

    def _copy(self, moves: Sequence[Move], records: Sequence[Bytes], *, is_load: bool) -> None:
        pairs = zip(moves, records, strict=True)
        for pools, group in groupby(pairs, key=lambda pair: pair[0].pools):
            own = list(group)
            copy = pools.copy_in if is_load else pools.copy_out
            with self._copier:
                copy([move.page for move, _ in own], [record for _, record in own])

    # -- stores

    def _take_store(self) -> Job | None:
        if self._to_clear:
            return self._clear
        if self._lookups:
            job, self._lookups = partial(self._look_up, self._lookups), []
            return job
        if self._loads:
            job = partial(self._load, self._loads[0], self._generation)
            self._loading.add(self._loads[0])
            self._loads.popleft()
            return job
        written = self._unflushed.values()
        if self._writes and len(written) < WRITES_IN_A_ROW and sum(written) < BYTES_IN_A_ROW:
            job = partial(self._write, self._writes[0])
            self._writing.append(self._writes[0])
            self._writes.popleft()
            return job
        if self._touched or self._unflushed:
            return partial(self._touch_and_flush, self._touched.take())
        return None

    def _clear(self) -> None:
        try:
            for store in self._stores:
                store.clear()
        finally:
            with self._changed:
                self._to_clear = False
                self._changed.notify_all()

    def _look_up(self, lookups: list[Lookup]) -> None:
        asked = {key for one in lookups for key, _ in one.keys if key not in one.present}
        try:
            for held in held_by_each(self._below, asked):
                for lookup in lookups:
                    lookup.add(held)
        finally:
            with self._changed:
                for lookup in lookups:
                    lookup.done = True
                self._tell()

    def _load(self, transfer: Transfer, generation: int) -> None:
        deadline = time.monotonic() + GRACE_SECONDS
        try:
            for move in transfer.moves:
                if transfer.is_cancelled or time.monotonic() > deadline:
                    return
                if not self._fetch(move, generation):
                    return
                deadline += move.pools.record_size / LEAST_RATE
                transfer.landed += 1
        finally:
            with self._changed:
                self._end(transfer)

    def _fetch(self, move: Move, generation: int) -> bool:
        """Copy one page from any tier to the device, and add it to the host tier.

        It is not added if a `reset` has raised the generation since the load began.
        """
        size = move.pools.record_size
        with self._changed:
            held = self._host.pin(move.key, size)
            slot = held or self._host.reserve(move.key, size)
        data = self._bounce[:size] if slot is None else slot.data
        found = False
        try:
            found = held is not None or any(s.read(move.key, data.data) for s in self._below)
            if found:
                self._copy([move], [data], is_load=True)
        finally:
            with self._changed:
                self._counts.h2d_blocks_copied += found
                self._read += held is not None
                if held is not None:
                    self._host.unpin(held)
                elif slot is not None and found and generation == self._generation:
                    self._host.publish(slot)
                    self._host.unpin(slot)
                elif slot is not None:
                    self._host.abandon(slot)
                self._changed.notify_all()  # a slot may be free
        return found

    def _write(self, slot: Slot) -> None:
        written = 0
        try:
            for store in self._stores:
                written += store.write(slot.key, [slot.data.data])
        finally:
            with self._changed:
                self._counts.offload_dropped += len(self._stores) - written
                self._writing.remove(slot)
                self._unflushed[slot.key] = slot.shelf.size
                self._host.unpin(slot)
                self._changed.notify_all()  # a slot is free

    def _touch_and_flush(self, keys: list[bytes]) -> None:
        try:
            for store in self._stores:
                if keys:
                    store.touch(keys)
                if self._unflushed:  # only this thread changes it
                    store.flush()
        finally:
            with self._changed:
                self._unflushed.clear()
