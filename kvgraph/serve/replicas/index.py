"""RoutingIndex: routes a prompt to the replica with the least work before its first token.

    table   64 bits of a page's digest -> bit mask of the replicas that hold the page

    cost    tokens to compute, those that wait before it, and those whose pages it would evict

Reports of a replica keep the table equal to its pool. A report that does not follow the previous
one is refused, and the replica sends all its pages: no restart of either side leaves stale entries.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace

from kvgraph.contract.dims import ceildiv
from kvgraph.kv.pool.lookup import deepest_window
from kvgraph.runtime.stats import EngineStats
from kvgraph.serve.facts import EngineFacts
from kvgraph.serve.held_lines import HeldLines
from kvgraph.serve.load import Load
from kvgraph.serve.replicas.messages import try_before
from kvgraph.serve.replicas.report import DECODE, Report, unpacked

ASSIGNED_SECONDS = 300.0
"""Age after which an assigned request without a report is no longer counted."""

LEAST_PAUSE_SECONDS = 0.01
MOST_REPORTS = 1000
"""Most reports per second of all replicas together: half of what a Ray actor handles."""

SILENT_SECONDS = 30.0
"""Time without a report after which a replica is forgotten."""


START_SECONDS = 30.0
"""Time that a replica may take to start, if the first one, with all of Serve, took less."""


@dataclass(slots=True)
class Known:
    """Data of the index on one replica."""

    bit: int
    epoch: bytes
    sequence: int
    facts: EngineFacts
    load: Load
    heard: float
    role: str
    num_pages: int = 0
    """Number of its pages in the table."""
    assigned: dict[str, tuple[int, float]] = field(default_factory=dict)
    """Requests that have not started: tokens to compute, and time of assignment, by request id."""
    turn: int = 0
    """Sequence number of its latest choice."""

    @property
    def queued_tokens(self) -> int:
        return sum([tokens for tokens, _ in self.assigned.values()])


class RoutingIndex:
    """The pages and loads of all replicas. `clock`: returns seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._table: dict[int, int] = {}
        self._known: dict[str, Known] = {}
        self._turns = itertools.count(1)
        self._gone: dict[bytes, EngineStats] = {}  # epoch -> counters of an engine that has ended
        self._is_draining = self._has_drained = False
        self._lines = HeldLines()
        self._began = clock()
        self._start_seconds: float | None = None
        self._empty_since: float | None = None

    # -- from replicas

    def report(self, report: Report) -> float | None:
        """Apply a report. Return the seconds before the next; None requests a whole report now."""
        if report.role == DECODE:
            self._empty_since = None
            if self._start_seconds is None:
                self._start_seconds = max(START_SECONDS, self._clock() - self._began)
        known = self._known.get(report.replica)
        if report.is_whole:
            known = self._begin(report)
        elif known is None or (known.epoch, known.sequence + 1) != (report.epoch, report.sequence):
            return None
        bit, table = known.bit, self._table
        for digest in unpacked(report.removed):
            mask = table.get(digest, 0)
            if mask & bit:
                known.num_pages -= 1
                if mask == bit:
                    del table[digest]
                else:
                    table[digest] = mask ^ bit
        for digest in unpacked(report.added):
            mask = table.get(digest, 0)
            if not mask & bit:
                known.num_pages += 1
                table[digest] = mask | bit
        for request in report.started:  # Ray may have chosen another replica than the first
            for other in self._known.values():
                other.assigned.pop(request, None)
        known.sequence, known.load, known.heard = report.sequence, report.load, self._clock()
        return max(LEAST_PAUSE_SECONDS, len(self._known) / MOST_REPORTS)

    def _begin(self, report: Report) -> Known:
        """Register a replica without pages; the whole report then adds them."""
        assert report.facts is not None
        old = self._known.get(report.replica)
        self.forget(report.replica)
        used = sum([known.bit for known in self._known.values()])
        bit = next(1 << i for i in itertools.count() if not used >> i & 1)
        now = self._clock()
        known = Known(bit, report.epoch, 0, report.facts, report.load, now, report.role)
        self._gone.pop(report.epoch, None)
        if old is not None and old.epoch == report.epoch:
            known.assigned, known.turn = old.assigned, old.turn
        self._known[report.replica] = known
        return known

    def forget(self, replica: str) -> None:
        """Remove a replica that has ended, with its pages."""
        known = self._known.pop(replica, None)
        if known is None:
            return
        if known.num_pages:
            rest = ~known.bit
            self._table = {d: left for d, mask in self._table.items() if (left := mask & rest)}
        if known.role == DECODE:
            self._gone[known.epoch] = _counters(known.load.stats)

    # -- from routers

    def choose(
        self, request: str, candidates: Sequence[str], chain: bytes, num_tokens: int
    ) -> list[str]:
        """Sort `candidates` by cost, cheapest first, and assign the request to the first one.

        `chain`: packed digests of the prompt's full pages. Candidates without a report come last.
        """
        self._forget_old()
        for other in self._known.values():  # it may be a retry
            other.assigned.pop(request, None)
            other.assigned.pop(try_before(request), None)
        known = {name: found for name in candidates if (found := self._known.get(name))}
        hits = self.hits(chain, known)
        costs = {name: _cost(known[name], hits[name], num_tokens) for name in known}
        order = sorted(known, key=lambda name: (costs[name], known[name].turn))
        if order:
            first = known[order[0]]
            left = num_tokens - hits[order[0]] * first.facts.page_size
            first.assigned[request] = left, self._clock()
            first.turn = next(self._turns)
        return order + [name for name in candidates if name not in known]

    def hits(self, chain: bytes, candidates: Collection[str]) -> dict[str, int]:
        """Number of the prompt's pages in the pool of each candidate, usable as a prefix."""
        digests = unpacked(chain)
        found = dict.fromkeys(candidates, 0)
        whole = {}
        for name in candidates:
            known = self._known[name]
            if (window := known.facts.window) is None:
                whole[name] = known.bit
            else:
                pages = ceildiv(window - 1, known.facts.page_size)
                found[name] = deepest_window(digests, _Held(self._table, known.bit), pages)
        left = sum(whole.values())
        for count, digest in enumerate(digests):
            now = left & self._table.get(digest, 0)
            if now != left:
                found |= {name: count for name, bit in whole.items() if (left ^ now) & bit}
                if not now:
                    return found
                left = now
        return found | {name: len(digests) for name, bit in whole.items() if left & bit}

    def _forget_old(self) -> None:
        """Forget silent replicas, and assigned requests that no report has mentioned."""
        now = self._clock()
        for name, known in list(self._known.items()):
            if now - known.heard > SILENT_SECONDS:
                self.forget(name)
                continue
            while known.assigned:  # the oldest first
                request, (_, since) = next(iter(known.assigned.items()))
                if now - since <= ASSIGNED_SECONDS:
                    break
                del known.assigned[request]

    # -- from the command

    def drain(self) -> bool:
        """Ask the ingress to drain, as Ray would tell it only at the very end.

        Return whether the ingress has no request left. Call it repeatedly: the index may restart.
        """
        self._is_draining = True
        return self._has_drained

    def lines(self) -> list[str]:
        """Lines of the ingress's log since the last call."""
        return self._lines.take()

    # -- from the ingress

    def end_drain(self) -> None:
        """Note that the ingress has no request left, and accepts none."""
        self._has_drained = True

    def log(self, lines: list[str]) -> None:
        """Hold lines of the log until the command asks for them."""
        self._lines.add(lines)

    # -- queries

    def is_draining(self) -> bool:
        return self._is_draining

    def facts(self) -> EngineFacts | None:
        """Facts of one engine, as all are alike; None before a report."""
        return next((known.facts for known in self._known.values()), None)

    def cached(self, chain: bytes) -> int | None:
        """Most pages of a prompt that the pool of any replica that answers requests holds; None if
        no prefill replica is known, so that none could compute the others."""
        self._forget_old()
        if all(known.role == DECODE for known in self._known.values()):
            return None
        names = [name for name, known in self._known.items() if known.role == DECODE]
        return max(self.hits(chain, names).values(), default=0)

    def load(self) -> tuple[int, Load | None]:
        """Number of replicas that answer requests, and their combined load."""
        self._forget_old()
        loads = [known.load for known in self._known.values() if known.role == DECODE]
        if not loads:
            return 0, None
        return len(loads), _together(loads, self._gone.values())

    def is_lost(self) -> bool:
        """Whether no replica that answers requests has been known, since this was first asked, for
        longer than one takes to start. A machine that was stopped has lost nothing."""
        self._forget_old()
        if any(known.role == DECODE for known in self._known.values()):
            return False
        now = self._clock()
        if self._empty_since is None:
            self._empty_since = now
        return now - self._empty_since > (self._start_seconds or START_SECONDS)

    def pages(self, replica: str) -> list[int]:
        """64 bits of the digest of each page that the replica holds."""
        bit = known.bit if (known := self._known.get(replica)) else 0
        return [digest for digest, mask in self._table.items() if mask & bit]

    def queued(self) -> Mapping[str, int]:
        """Tokens of waiting prompts, by replica."""
        return {name: known.queued_tokens for name, known in self._known.items()}

    @property
    def nbytes(self) -> int:
        """Memory of the table; a digest is an object of 32 bytes."""
        return sys.getsizeof(self._table) + 32 * len(self._table)


def _cost(known: Known, hit: int, num_tokens: int) -> tuple[int, int]:
    """Tokens to process before the request's first token; then the number of running requests."""
    size = known.facts.page_size
    fresh = ceildiv(num_tokens, size) - hit
    evicted = max(0, fresh - (known.facts.routed_pages - known.num_pages))
    tokens = num_tokens - hit * size + known.queued_tokens + evicted * size
    return tokens, known.load.stats.num_running


class _Held:
    """The set of digests whose pages one replica holds."""

    def __init__(self, table: Mapping[int, int], bit: int) -> None:
        self._table, self._bit = table, bit

    def __contains__(self, digest: object) -> bool:
        return bool(self._table.get(digest, 0) & self._bit)  # type: ignore[call-overload]


COUNTERS = (
    "generated_tokens",
    "num_preemptions",
    "num_failed_requests",
    "num_repairs",
    "prompt_tokens",
    "cached_tokens",
    "computed_tokens",
)
"""Fields of EngineStats that only grow."""


def _counters(stats: EngineStats) -> EngineStats:
    """Statistics of an engine that has ended: its counters only."""
    kept = {name: getattr(stats, name) for name in COUNTERS}
    return EngineStats(0, 0, num_free_pages=0, num_pages=0, **kept)


def _sum(parts: Sequence[EngineStats]) -> EngineStats:
    """The sum of each field; None counts as 0."""
    names = [entry.name for entry in fields(EngineStats)]
    return EngineStats(**{n: sum([getattr(part, n) or 0 for part in parts]) for n in names})


def _together(loads: Sequence[Load], gone: Iterable[EngineStats]) -> Load:
    """The load of all replicas: rates are summed."""
    ends = sum([1 / load.finish_seconds for load in loads if load.finish_seconds])
    free_pages = zip(*[load.free_pages for load in loads], strict=True)
    return replace(
        loads[0],
        free_pages=tuple(map(sum, free_pages)),
        stats=_sum([*(load.stats for load in loads), *gone]),
        prefill_rate=sum([load.prefill_rate or 0.0 for load in loads]) or None,
        finish_seconds=1 / ends if ends else 0.0,
    )
