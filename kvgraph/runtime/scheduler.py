"""Chooses the tokens of the next step: admission by pages, chunks by budget, preemption.

    enqueue -> waiting (first come, first served) ---------> running (oldest first) -> retired
                   ^   '-> loading (pages come from a tier) ---^ |
                   '------ preempted: newest first, recomputed --'

Running requests go before waiting ones. Only the head of the queue may be admitted, or the first
request behind those that are held back, so no request starves. A step that preempts admits none.

A waiting request is held back while a row of this step computes the first page that it lacks: in
the next step it finds that page in the prefix cache. It is held only while another row progresses
towards its end, so the wait is finite.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from operator import attrgetter
from time import perf_counter

import numpy as np

from kvgraph.contract.inputs import ModelInputs
from kvgraph.errors import InsufficientPagesError
from kvgraph.kv.manager import KVCacheManager
from kvgraph.kv.memory import SCORED_TOKENS
from kvgraph.kv.requests import TextContext
from kvgraph.runtime.guide import Guide
from kvgraph.runtime.logprobs import PromptScores
from kvgraph.runtime.pace import Pace
from kvgraph.runtime.sampling import FinishReason, TokenSource
from kvgraph.runtime.stats import PromptCounts, RequestStats
from kvgraph.runtime.text import TextStream

LOOK_AHEAD = 8
"""Waiting requests whose pages the tiers look up before they reach the head of the queue."""

_ARRIVAL = attrgetter("arrival")


@dataclass(eq=False, slots=True)
class Request:
    """An open request: its cache context, its sampling state, and its stop conditions."""

    context: TextContext
    source: TokenSource
    stop_tokens: frozenset[int]
    max_length: int
    """Length of prompt and output in tokens at which the request ends."""
    text: TextStream | None = None
    scores: PromptScores | None = None
    guide: Guide | None = None
    index: int = 0
    """Index of this completion among those of its prompt."""
    finish_reason: FinishReason | None = None
    arrival: int = 0
    """Sequence number of its submission."""
    stats: RequestStats = field(default_factory=RequestStats)
    request_id: str = field(init=False)
    prompt_length: int = field(init=False)

    def __post_init__(self) -> None:
        self.request_id = str(self.context.request_id)
        self.prompt_length = self.stats.prompt_tokens = self.context.current_length

    def reason_after(self, token: int, behind: int = 0) -> FinishReason | None:
        """Reason to end with `token` as the next token, or after `behind` others; None if none."""
        if token in self.stop_tokens:
            return "stop"
        return "length" if self.context.current_length + behind + 1 >= self.max_length else None

    def rewind_output(self) -> None:
        """Reset random numbers, text and grammar to continue after the context's tokens."""
        self.source.rewind(self.context.current_length - self.prompt_length)
        if self.text is not None:
            self.text.rewind()
        if self.guide is not None:
            self.guide.rewind()

    def redo(self, token: int | None, length: int, forced: Sequence[int] = ()) -> None:
        """Append `token` and `forced` after `length` tokens, unless an interrupted `update` did so.

        Afterwards the whole context must be processed again.
        """
        self.context.rewind()
        if token is not None and self.context.current_length == length:
            self.context.update(token, *forced)
            self.context.rewind()


@dataclass(slots=True)
class Batch:
    """One step: its rows, its graph inputs, and the rows whose last token gets logits.

    `requests`: contexts per replica, as the cache manager takes them. `scored`: rows and prompt
    positions that get logits too, after those of `sampled`. `began`: start of the step, by
    `perf_counter`; `pace` learns the time since then.
    """

    rows: list[Request]
    requests: list[list[TextContext]]
    inputs: ModelInputs
    sampled: list[Request]
    scored: Sequence[tuple[Request, range]] = ()
    pace: Pace | None = None
    began: float = 0.0

    def update(
        self,
        tokens: Sequence[int | None],
        reasons: Sequence[FinishReason | None],
        forced: Mapping[str, Sequence[int]],
    ) -> None:
        """Mark all active tokens as processed, and append `tokens`, one per sampled row. Report the
        step to `pace`, and note when rows got their first token or ended.

        A row with None has failed: it ends, and its pages of this step are not cached. `reasons`:
        why each row ends, or None. `forced`: by request id, tokens appended after its token.
        """
        if len(self.sampled) < len(self.rows):
            sampled = set(map(id, self.sampled))
            for row in self.rows:
                if id(row) not in sampled:
                    row.context.update()
        now = perf_counter()
        if self.pace is not None:
            decoding = int(np.count_nonzero(np.diff(self.inputs.input_row_offsets) == 1))
            self.pace.learn(decoding, self.inputs.tokens.size - decoding, now - self.began)
        for row, token, reason in zip(self.sampled, tokens, reasons, strict=True):
            if token is not None:
                row.context.update(token, *(forced.get(row.request_id, ()) if forced else ()))
            row.finish_reason = reason
            stats = row.stats
            if stats.first_token is None:
                stats.first_token = now
            if reason:
                stats.ended = now


@dataclass(eq=False)
class Scheduler:
    """Owns the queues; `schedule` is the one place that claims, allocates and preempts.

    `max_batch_tokens`: most new tokens of a step; a longer prompt is processed in chunks.
    `scored_tokens`: most tokens of a step from prompts that ask for log-probabilities. `pace`:
    bounds all prompt tokens of a step in which rows decode; None: no bound.
    Every queue is in the order of arrival.
    """

    kv: KVCacheManager
    max_batch_size: int
    max_batch_tokens: int
    scored_tokens: int = SCORED_TOKENS
    pace: Pace | None = None
    waiting: deque[Request] = field(default_factory=deque)
    loading: list[Request] = field(default_factory=list)
    running: list[Request] = field(default_factory=list)
    preemptions: int = 0
    prompts: PromptCounts = field(default_factory=PromptCounts)
    _arrivals: int = 0

    def require_room(self, request: Request) -> None:
        """Raise RequestError if the whole pool is too small for the request to complete."""
        tokens = request.max_length - 1  # the last token is never cached
        self.kv.require_room(request.context.request_id, tokens, self.max_batch_tokens)

    def enqueue(self, request: Request) -> None:
        """Queue a request for which `require_room` was called before."""
        request.arrival = self._arrivals = self._arrivals + 1
        self.waiting.append(request)

    def restart(self, requests: Collection[Request]) -> None:
        """Start over with `requests`, in order of arrival; the cache must hold none of them."""
        for request in requests:
            request.context.rewind()
        self.waiting, self.loading, self.running = deque(requests), [], []

    @property
    def busy(self) -> bool:
        """Whether any request is left. If `schedule` then returns None, tiers are looking.

        In that case `kv.wait()` blocks until they may have an answer.
        """
        return bool(self.running or self.loading or self.waiting)

    def schedule(self) -> Batch | None:
        """The next step, or None when nothing can run now."""
        if not self.busy:
            return None
        self._settle_loads()
        rows, preempted = self._continue_running(self.max_batch_tokens)
        is_asked = False
        if self.waiting and not preempted:
            admitted, is_asked = self._admit(self._budget_left(rows), rows)
            rows += admitted
        fits = rows or self.loading or is_asked
        assert fits, "the oldest always fits: `require_room` refused it otherwise"
        return _batch(rows, self.pace) if rows else None

    def retire(self) -> None:
        """Release finished requests."""
        done = [row for row in self.running if row.finish_reason]
        for row in done:
            self.kv.release(row.context.request_id)
        if done:
            self.running = [row for row in self.running if not row.finish_reason]

    def cancel(self, request_id: str) -> bool:
        """Remove a request from any queue; False if it is in none."""
        for queue in (self.running, self.loading, self.waiting):
            for row in queue:
                if row.request_id == request_id:
                    if queue is not self.waiting:
                        self.kv.release(row.context.request_id)
                    queue.remove(row)
                    return True
        return False

    def _settle_loads(self) -> None:
        """Move requests whose pages were loaded to running; requeue those whose load failed."""
        ended = self.kv.poll()
        if not ended:
            return
        for request in [r for r in self.loading if r.context.request_id in ended]:
            self.loading.remove(request)
            if ended[request.context.request_id]:
                self.prompts.start(request.stats, request.context.processed_length)
                insort(self.running, request, key=_ARRIVAL)
            else:
                self.kv.release(request.context.request_id)
                insort(self.waiting, request, key=_ARRIVAL)

    def _continue_running(self, budget: int) -> tuple[list[Request], bool]:
        """Allocate pages for running rows; preempt the newest while pages are short.

        Return the rows of this step, and whether any was preempted."""
        preempted = False
        while True:
            prompts = self._prompt_budget(self.running, budget)
            rows = _cut_to_budget(
                self.running,
                tokens=budget,
                prompt_tokens=prompts,
                scored_tokens=self.scored_tokens,
            )
            try:
                self.kv.alloc_batch([[row.context for row in rows]])
                return rows, preempted
            except InsufficientPagesError:
                self._preempt(self.loading or self.running)
                preempted = True

    def _prompt_budget(self, rows: Iterable[Request], budget: int) -> int:
        """Most prompt tokens of a step with `rows`. Waiting requests count up to the free rows."""
        if self.pace is None:
            return budget
        decoding = sum(map(_decodes, rows))
        room = self.max_batch_size - self._num_claimed
        waiting = min(len(self.waiting), room) + len(self.running) - decoding
        most = self.pace.prompt_tokens(decoding, waiting)
        return budget if most is None else min(budget, most)

    def _budget_left(self, rows: Sequence[Request]) -> int:
        """Tokens that may still join `rows`, given their active lengths."""
        lengths = [row.context.active_length for row in rows]
        left = self.max_batch_tokens - sum(lengths)
        prompts = sum([length for length in lengths if length > 1])
        return min(left, self._prompt_budget(rows, self.max_batch_tokens) - prompts)

    def _preempt(self, candidates: list[Request]) -> None:
        """Release the newest and queue it first; its tokens are recomputed, not lost."""
        victim = candidates.pop()
        self.kv.release(victim.context.request_id)
        victim.context.rewind()
        insort(self.waiting, victim, key=_ARRIVAL)
        self.preemptions += 1

    def _admit(self, budget: int, rows: Sequence[Request]) -> tuple[list[Request], bool]:
        """Admit waiting requests to the `rows` of this step. Return them, and whether admission
        stopped at a request for which the tiers are still looking."""
        admitted: list[Request] = []
        coming: set[bytes] | None = None
        held = 0
        self.kv.prefetch([request.context for request in islice(self.waiting, LOOK_AHEAD)])
        while held < len(self.waiting) and budget > 0 and self._num_claimed < self.max_batch_size:
            request = self.waiting[held]
            context = request.context
            if not all(self.kv.prefetch([context])):
                return admitted, True
            # Room for the whole prompt, not only its first chunk: else prompts evict each other.
            # A lone request needs only its first chunk: windows free pages as the prompt advances.
            if self._num_claimed and not self.kv.has_room(context):
                break
            if coming is None:
                coming = self.kv.coming_pages([row.context for row in rows])
            if coming and self.kv.missing_page(context) in coming:
                held += 1
                continue
            most = budget
            if request.scores is not None:
                most = min(budget, self.scored_tokens - _scored([*rows, *admitted]))
                if most < 1:
                    break
            self.kv.claim(context.request_id)
            context.active_length = min(context.active_length, most)
            try:
                self.kv.alloc(context)
            except InsufficientPagesError:
                self.kv.release(context.request_id)
                context.rewind()
                break
            del self.waiting[held]
            if self.kv.is_loading(context.request_id):
                insort(self.loading, request, key=_ARRIVAL)
                continue
            self.prompts.start(request.stats, context.processed_length)
            budget -= context.active_length
            insort(self.running, request, key=_ARRIVAL)
            admitted.append(request)
            coming |= self.kv.coming_pages([context])
        return admitted, False

    @property
    def _num_claimed(self) -> int:
        return len(self.running) + len(self.loading)


def _decodes(row: Request) -> bool:
    return row.context.current_length - row.context.processed_length == 1


def _cut_to_budget(
    running: Iterable[Request], *, tokens: int, prompt_tokens: int, scored_tokens: int
) -> list[Request]:
    """Set the active length of each row, oldest first, and return the rows that run.

    `tokens`: most new tokens of the step. `prompt_tokens`: most of them that are part of a prompt.
    `scored_tokens`: most of those that get logits.
    """
    rows = []
    for row in running:
        if tokens <= 0:
            break
        context = row.context
        rest = context.current_length - context.processed_length
        if row.scores is not None and row.scores.is_due(context):
            if scored_tokens <= 0:
                continue
            rest = min(rest, scored_tokens)
            scored_tokens -= min(rest, tokens, prompt_tokens)
        if rest > 1:
            if prompt_tokens <= 0:
                continue
            rest = min(rest, prompt_tokens)
            prompt_tokens -= min(rest, tokens)
        context.active_length = active = rest if rest < tokens else tokens
        tokens -= active
        rows.append(row)
    return rows


def _scored(rows: Iterable[Request]) -> int:
    """Tokens of prompts that get logits in a step of `rows`."""
    return sum([len(row.scores.span(row.context)) for row in rows if row.scores is not None])


def _batch(rows: list[Request], pace: Pace | None) -> Batch:
    contexts = [row.context for row in rows]
    end, offsets, indices, sampled = 0, [0], [], []
    scored: list[tuple[Request, range]] = []
    in_prompt: list[int] = []
    for row, context in zip(rows, contexts, strict=True):
        active = context.active_length
        if row.scores is not None and (span := row.scores.span(context)):
            scored.append((row, span))
            in_prompt += [end + position - context.processed_length for position in span]
        end += active
        offsets.append(end)
        if context.processed_length + active == context.current_length:
            indices.append(end - 1)
            sampled.append(row)
    tokens = np.concatenate([context.active_tokens for context in contexts])
    # A step of nothing but chunks still needs one row of logits: dims are at least 1.
    logits_indices = np.array(indices + in_prompt or [0], np.int32)
    inputs = ModelInputs(tokens, np.array(offsets, np.int32), logits_indices)
    return Batch(rows, [contexts], inputs, sampled, scored, pace, perf_counter())
