"""The connector over a host store and the stores below it, as the step's thread calls it.

    step's thread   lookup, load, offload, poll: they queue work and return
    workers         the threads that do the work (`workers.py`)

Write-through: a committed page goes to the host, and from its slot to every store. A page that is
loaded from below the host also joins the host tier.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from itertools import filterfalse
from operator import attrgetter

from kvgraph.errors import StoreError
from kvgraph.kv.metrics import KVCacheMetrics
from kvgraph.kv.tiers.connector import Lookup, Move, Transfer
from kvgraph.kv.tiers.store import StoreStats
from kvgraph.kv.tiers.workers import TierWorkers


class TieredConnector(TierWorkers):
    """A `Connector` (see there) that queues work for its workers."""

    def lookup(self, asked: Sequence[Sequence[tuple[bytes, int]]]) -> list[Lookup]:
        lookups = [Lookup(keys) for keys in asked]
        with self._lock:
            for lookup in lookups:
                if self._is_closing:
                    lookup.done = True
                    continue
                lookup.add(self._in_host(lookup))
                lookup.done = len(lookup.present) == len(lookup.keys) or not self._below
            self._lookups += filterfalse(attrgetter("done"), lookups)
            self._changed.notify_all()
        return lookups

    def _in_host(self, lookup: Lookup) -> set[bytes]:
        return {key for key, size in lookup.keys if self._host.has(key, size)}

    def load(self, moves: Sequence[Move]) -> Transfer:
        transfer = Transfer(moves, is_load=True)
        with self._lock:
            if self._is_closing:
                self._end(transfer)
            elif all(self._host.has(move.key, move.pools.record_size) for move in moves):
                self._host_loads.append((transfer, [self._pin(move) for move in moves]))
            elif self._below:
                self._loads.append(transfer)
            else:
                self._end(transfer)
            self._changed.notify_all()
        return transfer

    def cancel(self, transfer: Transfer) -> None:
        transfer.is_cancelled = True
        with self._lock:
            if transfer in self._loads:
                self._loads.remove(transfer)
                self._end(transfer)
            for queued, slots in self._host_loads:
                if queued is transfer:
                    self._host_loads.remove((queued, slots))
                    for slot in slots:
                        self._host.unpin(slot)
                    self._end(transfer)
                    break

    def _give_up(self) -> None:
        with self._lock:
            self._is_closing = True
            for transfer in [*self._loads, *[transfer for transfer, _ in self._host_loads]]:
                self.cancel(transfer)
            for lookup in self._lookups:
                lookup.done = True
            self._lookups.clear()
            self._tell()
        self.drop_queued()

    def offload(self, moves: Sequence[Move]) -> list[Move]:
        if not (self._host.num_pages or self._stores):
            return []
        with self._lock:
            if self._is_closing:
                return []
            fresh = list(filterfalse(self._is_in_host, moves))
            taken = fresh[: max(0, self._max_offloads - len(self._offloads))]
            self._counts.offload_dropped += len(fresh) - len(taken)
            if taken:
                self._offloads.extend(taken)
                self._changed.notify_all()
        return taken

    def _is_in_host(self, move: Move) -> bool:
        return self._host.knows(move.key, move.pools.record_size)

    def has_settled(self, keys: Collection[bytes]) -> bool:
        with self._lock:
            slots = [*self._writes, *self._writing]
            coming = {move.key for move in self._offloads} | {slot.key for slot in slots}
            coming |= self._unflushed.keys()
            return not any(key in coming or self._host.is_coming(key) for key in keys)

    def touch(self, keys: Sequence[bytes]) -> None:
        with self._lock:
            self._host.touch(keys)
            if self._stores and not self._is_closing:
                self._touched.add(keys)
                self._changed.notify_all()

    def poll(self) -> Sequence[Transfer]:
        if not self._news:
            return ()
        with self._lock:
            ended, self._ended = self._ended, []
            self._news = False
        return ended

    def wait(self, timeout: float | None = None) -> bool:
        with self._lock:
            self._changed.wait_for(lambda: self._news or self._has_ended(), timeout)
            return self._news

    def yield_pages(self) -> bool:
        with self._lock:
            while not self._news:
                cancelled = any(transfer.is_cancelled for transfer in self._loading)
                if (
                    self._num_copying
                    or cancelled
                    or (self._offloads and self._num_serving and not self._is_starved)
                ):
                    self._changed.wait()
                elif self._offloads:
                    self._drop_offloads()
                else:
                    return False
        return True

    def drain(self) -> None:
        with self._lock:
            self._counts.offload_dropped += len(self._offloads)
            for queue in (self._host_loads, self._loads, self._offloads):
                queue.clear()
            for transfer in self._loading:
                transfer.is_cancelled = True
            self._changed.notify_all()
            while self._loading or self._num_copying:
                self._changed.wait()
            self._host.pin_only([*self._writes, *self._writing])
            self._ended, self._news = [], False

    def reset(self) -> None:
        with self._lock:
            self._generation += 1
            if self._offloads:  # ended without counting them as dropped
                self._end(Transfer(list(self._offloads), is_load=False))
                self._offloads.clear()
            self._host.clear()
            while self._writes:  # after an interrupt a slot may stay pinned, but none unpins twice
                self._host.unpin(self._writes.popleft())
            self._touched.clear()
            self._to_clear = bool(self._stores)
            self._changed.notify_all()
            if self._num_serving:
                self._changed.wait_for(lambda: not self._to_clear or not self._num_serving)
        if self._to_clear:
            self.require_open("reset")
            self._clear()

    def require_open(self, call: str) -> None:
        if self._stores and self._is_closing:
            raise StoreError(
                f"{call}: expected tiers that are open, got tiers that were closed, and their "
                "stores keep their pages; open the stores in a new engine or manager"
            )

    def metrics(self) -> KVCacheMetrics:
        with self._lock:
            counts = self._counts + KVCacheMetrics(inflight_ops=self._num_inflight())
        for store in self._stores:
            found = store.stats()
            if store.name == "disk":
                counts.disk_blocks_read += found.read
                counts.disk_blocks_written += found.written
            elif store.name == "remote":
                counts.remote_blocks_read += found.read
                counts.remote_blocks_written += found.written
        return counts

    def stats(self) -> dict[str, StoreStats]:
        with self._lock:
            host = StoreStats(
                num_pages=self._host.num_pages,
                num_used_pages=self._host.num_used_pages,
                nbytes=self._host.nbytes,
                read=self._read,
                written=self._written,
                evicted=self._host.evicted,
            )
        found = {"host": host}
        for store in self._below:  # two bound prefixes have one name
            found[store.name] = found.get(store.name, StoreStats()) + store.stats()
        return found

    def work(self) -> bool:
        """Do one job of a thread, if there are no threads; False if there is nothing to do."""
        with self._changed:
            job = self._take_copy() or self._take_store()
        if job is not None:
            job()
        return job is not None

    def _has_ended(self) -> bool:
        return self._is_closing and not self._num_serving
