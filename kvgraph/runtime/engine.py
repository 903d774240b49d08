"""Engine: continuous batching over one artifact, from prompts to tokens."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from threading import get_ident
from typing import Unpack

from kvgraph.contract.not_copyable import NotCopyable
from kvgraph.errors import GenerationError, RequestError
from kvgraph.runtime import artifact as artifacts
from kvgraph.runtime.arguments import instance, optional_integer
from kvgraph.runtime.artifact import Artifact
from kvgraph.runtime.cache import make_cache
from kvgraph.runtime.chat import Chats
from kvgraph.runtime.config import (
    BatchConfig,
    CacheConfig,
    ConfigFields,
    TierConfig,
    configured,
    require_known,
)
from kvgraph.runtime.generate_progress import report_progress, report_prompt
from kvgraph.runtime.outcome import Outcome, outcome_of
from kvgraph.runtime.request_builder import RequestBuilder
from kvgraph.runtime.sampling import Logits, SamplingParams, Token
from kvgraph.runtime.scheduler import Batch, Request
from kvgraph.runtime.sessions.base import Session
from kvgraph.runtime.stats import EngineStats, cache_stats
from kvgraph.runtime.text import Completion, completions_of
from kvgraph.runtime.turns import Turns, in_turn

MOST_WAIT_SECONDS = 0.05
"""Longest time for which an engine that can run nothing waits for tiers before it retries."""


class Engine(Chats, NotCopyable):
    """Runs ragged batches over an artifact: prefill, chunks and decode rows in one graph.

        engine = Engine("tiny.kvg")
        for piece in engine.stream("The import statement"):
            print(piece, end="", flush=True)

    `artifact`: a folder or a loaded Artifact. `session`: one of its sessions, or the name of one
    (default: its backend's). `num_threads`: CPU threads of a session that is opened here.
    `cache` (the pool), `tiers` (which keep evicted pages) and `batch` (the size of a step) are
    config records. Every field of a record is a keyword too: `Engine(path, num_pages=100)`.
    RequestError for a record and one of its fields. An engine with tiers has threads: `close` it,
    or use it in a `with` statement.

    Threads may use an engine in turn; a call that overlaps another one raises RequestError. A call
    that raises, even KeyboardInterrupt, loses no token of any request: its step did not happen, or
    the next `step` returns its tokens. The next call repairs the bookkeeping, and if it must,
    computes all open requests again (counted in `repairs`). A request that fails on its own
    (counted in `failed_requests`) ends with finish_reason "error"; the others continue.
    """

    def __init__(
        self,
        artifact: str | Path | Artifact,
        *,
        session: str | Session | None = None,
        num_threads: int | None = None,
        cache: CacheConfig | None = None,
        tiers: TierConfig | None = None,
        batch: BatchConfig | None = None,
        **fields: Unpack[ConfigFields],
    ) -> None:
        require_known(fields)
        cache = configured("cache", CacheConfig, cache, fields)
        tiers = configured("tiers", TierConfig, tiers, fields)
        batch = configured("batch", BatchConfig, batch, fields)
        num_threads = optional_integer("num_threads", num_threads, 0)
        if not isinstance(artifact, Artifact):
            artifact = artifacts.load(artifact)
        self.artifact = artifact
        self.model = artifact.manifest.model
        self._owns_session = not isinstance(session, Session)
        self.session = session = artifact.opened(session, num_threads=num_threads)
        self.kv, self.scheduler, self._buckets = make_cache(artifact, session, cache, tiers, batch)
        super().__init__(artifact.folder, artifact.manifest.files)
        artifact.require_unchanged()
        self._builder = RequestBuilder(self.model, self._text, self.scheduler)
        self._turns = Turns("Engine")
        self._is_shared = False  # an AsyncEngine runs it
        self._ids = itertools.count()
        self._open: dict[str, Request] = {}  # requests that have not ended, in order of arrival
        self._held: list[Token] = []  # tokens that no caller has received yet
        self._streamed: dict[str, Request] = {}  # their tokens are for a `stream`, not for `step`
        self._abandoned: deque[Request] = deque()  # their callers have left
        self._outcome: Outcome | None = None  # a completed step that is not recorded yet
        self._is_whole = True  # False if a call was interrupted while it changed scheduler or kv
        self._in_step = False  # a step has started and is not recorded yet
        self.generated_tokens = self.failed_requests = self.repairs = 0

    @property
    def busy(self) -> bool:
        """Whether `step` has work to do, or tokens to return."""
        return bool(self._open or self._outcome or self._held_apart(self._streamed)[1])

    def step(self) -> list[Token]:
        """Run one batch, and return the tokens that it generated, in row order.

        First come tokens of earlier steps that no call has returned; an open `stream` yields its
        own tokens. Empty when idle (see `busy`), and for a batch of prompt chunks only.
        """
        call = ("step", get_ident())
        try:
            if (running := self._turns.take(call)) is not call:
                raise self._turns.overlap(call, running)
            self._run_step()
            held, tokens = self._held_apart(self._streamed)
            self._held = held  # last, with no call after it: an interrupt then loses no token
            return tokens
        finally:
            if self._turns.running is call:
                del self._turns.running

    def _run_step(self) -> None:
        """Run one batch and hold its tokens; do nothing if there is nothing to run."""
        if self._abandoned or not self._is_whole or self._in_step:
            self._settle()
        batch = self._schedule()
        while batch is None and self.scheduler.busy:
            self.kv.wait(MOST_WAIT_SECONDS)  # all requests wait for pages from a tier
            batch = self._schedule()
        if batch is not None:
            self._in_step = True
            logits = self._run(batch)
            self._commit(outcome_of(batch, logits))
        if self._abandoned:  # while the step ran
            self._settle()

    @in_turn("submit")
    def submit(
        self,
        prompt: str | Sequence[int],
        sampling: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        cache_salt: bytes = b"",
    ) -> str:
        """Queue a prompt (text or token ids) and return its request id; runs nothing.

        Requests share cached prefixes only with those of the same `cache_salt`.
        RequestError: an argument of another type, an empty prompt, one that leaves no room below
        the model's `max_seq_len`, or one that the whole pool cannot hold with its output.
        """
        self._settle()
        request = self._request(prompt, sampling, request_id, cache_salt)
        self._queue(request)
        return request.request_id

    @in_turn("cancel")
    def cancel(self, request_id: str) -> None:
        """Stop a request and free its pages; no more tokens of it are returned. RequestError for
        an id that is unknown, or whose last token was returned."""
        self._settle()
        instance("request_id", request_id, str, "text")
        if not self._is_open(request_id):
            raise RequestError(f"cancel of {request_id!r}: expected an open request, got none")
        self._end(request_id)

    def stream(
        self, prompt: str | Sequence[int], sampling: SamplingParams | None = None
    ) -> Iterator[str]:
        """Generate for one prompt; yield pieces of text. Leaving early cancels the request.

        GenerationError if this request fails.
        """
        request = self._request(prompt, sampling)
        try:
            self._begin(request)
            self._streamed[request.request_id] = request
            while self._is_open(request.request_id):
                for token in self._next_of(request):
                    if token.text:
                        yield token.text
                    if token.error:
                        raise GenerationError(token.error)
        finally:
            self._abandoned.append(request)  # before any call that an interrupt may stop
            self._leave()

    @in_turn("generate")
    def generate(
        self,
        prompts: Sequence[str | Sequence[int]],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[Completion]:
        """Generate for all prompts together; completions in the prompts' order, `n` for each.

        RequestError as in `submit`, with the prompt's index, before any of them runs.
        """
        return self._generate(prompts, sampling)

    def stats(self) -> EngineStats:
        """Requests that run and wait now, and counters since the start. Callable in any thread."""
        rows = self.scheduler
        waiting = len(rows.waiting) + len(rows.loading)
        done = self.generated_tokens, rows.preemptions, self.failed_requests, self.repairs
        return EngineStats(len(rows.running), waiting, *done, **cache_stats(self.kv, rows.prompts))

    def __repr__(self) -> str:
        return f"<Engine {self.artifact.folder.name}: {self.stats()}>"

    @in_turn("close")
    def close(self) -> None:
        """Finish the queued writes to tiers, and close them, and the session with its other ranks
        if the engine opened it. Later calls raise RequestError. Idempotent."""
        self._turns.end()
        self.kv.close()
        if self._owns_session:
            self.session.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # -- a step: calls that may fail come first, changes of requests last

    def _schedule(self) -> Batch | None:
        self._is_whole = False
        batch = self.scheduler.schedule()
        self._is_whole = True
        return batch

    def _run(self, batch: Batch) -> Logits:
        """Logits of the batch's rows, then of padding rows if a decode step runs padded."""
        padded = self._buckets.pad(batch) if self._buckets else None
        step, bounds = padded or batch, padded.bounds if padded else None
        self._is_whole = False
        kv_inputs = self.kv.runtime_inputs(step.requests, batch_characteristics=bounds)
        self._is_whole = True
        return self.session.run(step.inputs, kv_inputs, capture=padded is not None)

    def _commit(self, outcome: Outcome) -> None:
        """Give every request its token. If this is interrupted, `_repair` does the rest."""
        self._is_whole = False
        self._outcome = outcome  # from here on the step has happened
        outcome.batch.update(outcome.tokens, outcome.reasons, outcome.forced)  # they grow first
        self.kv.step(outcome.batch.requests)  # then full pages join the prefix cache
        if any(outcome.reasons):
            self.scheduler.retire()
        self._record(outcome)
        self._is_whole = True

    def _record(self, outcome: Outcome) -> None:
        """Hold the step's tokens for their callers, in one assignment: exactly once."""
        failed = outcome.reasons.count("error")
        if any(outcome.reasons):
            for token in outcome.generated:
                if token.finish_reason:
                    self._open.pop(token.request_id, None)
        self._held, self._outcome, self._in_step = self._held + outcome.generated, None, False
        self.generated_tokens += len(outcome.generated) - failed
        self.failed_requests += failed

    # -- calls that did not end

    def _settle(self) -> None:
        """Repair the state that earlier calls left half done. May itself be interrupted."""
        if self._in_step:
            self.session.synchronize()
        if not self._is_whole:
            self._repair()
        if self._in_step:
            for request in self._open.values():
                request.rewind_output()
            self._in_step = False
        while self._abandoned:
            self._forget(self._abandoned[0])
            self._abandoned.popleft()

    def _repair(self) -> None:
        """Rebuild all bookkeeping: every open request starts over, with the tokens it has."""
        outcome = self._outcome
        if outcome is not None:
            for row, token, length in zip(
                outcome.batch.sampled, outcome.tokens, outcome.lengths, strict=True
            ):
                row.redo(token, length, outcome.forced.get(row.request_id, ()))
            self._record(outcome)
        self.kv.rebuild()
        if self._buckets is not None:
            self._buckets.claim()
        self.scheduler.restart(self._open.values())
        self.repairs += 1
        self._is_whole = True

    # -- requests that come and go

    def _generate(
        self,
        prompts: Sequence[str | Sequence[int]],
        sampling: SamplingParams | Sequence[SamplingParams] | None,
    ) -> list[Completion]:
        self._settle()
        requests = self._builder.requests(self._new_id, prompts, sampling)
        tokens: dict[str, list[Token]] = {request.request_id: [] for request in requests}
        try:
            for request in requests:
                self._queue(request)
            with report_progress(requests) as update:
                while any(map(self._is_open, tokens)):
                    self._run_step()
                    own, self._held = self._held_apart(tokens)
                    for token in own:
                        tokens[token.request_id].append(token)
                    update()
        finally:
            self._abandoned.extend(requests)
            self._settle()
        return completions_of(tokens, [r.stats for r in requests], [r.index for r in requests])

    def _request(
        self,
        prompt: str | Sequence[int],
        sampling: SamplingParams | None,
        request_id: str | None = None,
        cache_salt: bytes = b"",
    ) -> Request:
        """Build a request that can complete; change nothing. RequestError as in `submit`."""
        if request_id is not None:
            instance("request_id", request_id, str, "text")
            self._require_new(request_id)
        name = self._new_id() if request_id is None else request_id
        return self._builder.request(name, prompt, sampling, cache_salt)

    def _queue(self, request: Request) -> None:
        self.session.require_unchanged()
        self._is_whole = False
        self.scheduler.enqueue(request)
        self._open[request.request_id] = request
        self._is_whole = True

    def _end(self, request_id: str) -> None:
        """Stop the request if it is open, free its pages, and drop its held tokens."""
        held = self._held_apart([request_id])[1]
        self._is_whole = False
        self._held = held  # no call between this and the next line: an interrupt splits neither
        if self._open.pop(request_id, None) is not None:
            self.scheduler.cancel(request_id)
        self._is_whole = True

    @in_turn("stream")
    def _begin(self, request: Request) -> None:
        self._settle()
        self._require_new(request.request_id)
        self._queue(request)

    @in_turn("stream")
    def _next_of(self, request: Request) -> list[Token]:
        """Run steps until tokens of the request come; hold those of other requests."""
        own: list[Token] = []
        with report_prompt(request) as update:
            while not own and self._is_open(request.request_id):
                self._run_step()
                own, self._held = self._held_apart([request.request_id])
                update()
        return own

    def _leave(self) -> None:
        """Forget abandoned requests now, or after the running call: a stream may be left at any
        time, also by the garbage collector."""
        call = ("stream", get_ident())
        try:
            if self._turns.take(call) is call:
                self._settle()
        finally:
            if self._turns.running is call:
                del self._turns.running

    def _forget(self, request: Request) -> None:
        if self._open.get(request.request_id, request) is request:
            self._end(request.request_id)
        if self._streamed.get(request.request_id) is request:
            del self._streamed[request.request_id]

    def _held_apart(self, ids: Collection[str]) -> tuple[list[Token], list[Token]]:
        """Held tokens of `ids`, and held tokens of all other requests."""
        own = [token for token in self._held if token.request_id in ids]
        return own, [token for token in self._held if token.request_id not in ids]

    def _is_open(self, request_id: str) -> bool:
        """Whether tokens of the request are still to be returned."""
        return request_id in self._open or any(t.request_id == request_id for t in self._held)

    def _require_new(self, request_id: str) -> None:
        if self._is_open(request_id) or request_id in self._streamed:
            raise RequestError(f"request {request_id!r}: expected a new id, got one in use")

    def _new_id(self) -> str:
        return next(name for i in self._ids if not self._is_open(name := f"request-{i}"))
