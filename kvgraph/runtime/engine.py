"""Engine: continuous batching over one artifact, from prompts to tokens."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from threading import get_ident
from typing import Unpack

from kvgraph.errors import GenerationError, RequestError
from kvgraph.kv.uncopied import Uncopied
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
from kvgraph.runtime.outcome import Outcome, outcome_of
from kvgraph.runtime.request_builder import RequestBuilder
from kvgraph.runtime.sampling import Logits, SamplingParams, Token
from kvgraph.runtime.scheduler import Batch, Request
from kvgraph.runtime.sessions.base import Session
from kvgraph.runtime.share import shared
from kvgraph.runtime.stats import EngineStats, cache_stats
from kvgraph.runtime.text import Completion, completions_of
from kvgraph.runtime.turns import Turns, in_turn

MOST_WAIT_SECONDS = 0.05
"""How long an engine without anything to run waits for tiers before it looks again."""


class Engine(Chats, Uncopied):
    """Runs ragged batches over an artifact: prefill, chunks and decode rows in one graph.

        engine = Engine("tiny.kvg")
        for piece in engine.stream("The import statement"):
            print(piece, end="", flush=True)

    `artifact` is a folder or a loaded Artifact; `session` one of its sessions, or the name of one
    (default: its backend's); `num_threads` are the CPU threads of a session that is made here.
    Settings are records: `cache` (the pool), `tiers` (what holds pages that leave it) and `batch`
    (the size of a step). Every field of a record is a keyword too, `Engine(path, num_pages=100)`;
    RequestError for a record and one of its fields. An engine with tiers has threads: `close` it,
    or use it in a `with` statement.

    Threads may use an engine in turn: a call that overlaps another one is a RequestError. A call
    that raises, by an interrupt (KeyboardInterrupt) too, costs no request a token: its step did not
    happen, or the next `step` gives its tokens. The next call repairs what is half done; where it
    must, it computes all open requests again (counted in `repairs`). A request that fails on its
    own (counted in `failed_requests`) ends with finish_reason "error", and the others go on.
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
        if not isinstance(session, Session):
            session = artifact.session(session, num_threads=num_threads)
        self.session = session
        self.kv, self.scheduler, self._buckets = make_cache(artifact, session, cache, tiers, batch)
        super().__init__(artifact.folder)
        artifact.require_unchanged()
        self._builder = RequestBuilder(self.model, self._text, self.scheduler)
        self._turns = Turns("Engine")
        self._is_shared = False  # an AsyncEngine runs it
        self._ids = itertools.count()
        self._open: dict[str, Request] = {}  # all that have not ended, in the order of arrival
        self._held: list[Token] = []  # not handed over yet
        self._streamed: dict[str, Request] = {}  # their tokens are for a `stream`, not for `step`
        self._abandoned: deque[Request] = deque()  # that no caller waits for any more
        self._outcome: Outcome | None = None  # of a step that has happened and is not recorded yet
        self._is_whole = True  # scheduler and manager: False where a call that changes them stopped
        self._in_step = False  # a step has begun to run and is not recorded yet
        self.generated_tokens = self.failed_requests = self.repairs = 0

    @property
    def busy(self) -> bool:
        """Whether `step` has something to do, or tokens to give."""
        return bool(self._open or self._outcome or self._held_apart(self._streamed)[1])

    def step(self) -> list[Token]:
        """Run one batch; the tokens that it generated, in row order.

        Before them come tokens of steps before it that no call has handed over; an open `stream`
        gives its own. Empty when idle (see `busy`), and of a batch that is but chunks of prompts.
        """
        call = ("step", get_ident())
        try:
            if (running := self._turns.take(call)) is not call:
                raise self._turns.overlap(call, running)
            self._run_step()
            held, tokens = self._held_apart(self._streamed)
            self._held = held  # no call from here on, so no interrupt: the caller has them
            return tokens
        finally:
            if self._turns.running is call:
                del self._turns.running

    def _run_step(self) -> None:
        """One batch, whose tokens are held; nothing, where there is nothing to run."""
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
        """Stop a request: its pages are free, and no token of it comes any more. RequestError for
        an id that is unknown, or whose last token was handed over."""
        self._settle()
        instance("request_id", request_id, str, "text")
        if not self._is_open(request_id):
            raise RequestError(
                f"cancel of {request_id!r}: expected an open request, got none of this id"
            )
        self._end(request_id)

    def stream(
        self, prompt: str | Sequence[int], sampling: SamplingParams | None = None
    ) -> Iterator[str]:
        """Generate for one prompt; pieces of text as they come. Leaving early cancels it.

        GenerationError where the request fails on its own.
        """
        request = self._request(prompt, sampling)
        try:
            self._begin(request)
            self._streamed[request.request_id] = request
            while self._is_open(request.request_id):
                for token in self._step_for([request.request_id]):
                    if token.text:
                        yield token.text
                    if token.error:
                        raise GenerationError(token.error)
        finally:
            self._abandoned.append(request)  # before a call, which an interrupt may end
            self._leave()

    @in_turn("generate")
    def generate(
        self,
        prompts: Sequence[str | Sequence[int]],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[Completion]:
        """Generate for all prompts together; completions in the prompts' order, `n` of each.

        RequestError as of `submit`, with the prompt's index, before any of them runs.
        """
        return self._generate(prompts, sampling)

    def stats(self) -> EngineStats:
        """What runs now, and counters since the start. Any thread may ask, at any time."""
        rows = self.scheduler
        waiting = len(rows.waiting) + len(rows.loading)
        done = self.generated_tokens, rows.preemptions, self.failed_requests, self.repairs
        return EngineStats(len(rows.running), waiting, *done, **cache_stats(self.kv))

    def __repr__(self) -> str:
        return f"<Engine {self.artifact.folder.name}: {self.stats()}>"

    @in_turn("close")
    def close(self) -> None:
        """Finish what is queued for the tiers, and let go of them; the other ranks end, where the
        engine has opened the session. Idempotent."""
        self.kv.close()
        if self._owns_session:
            self.session.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # -- a step: what may fail comes first, what changes requests last

    def _schedule(self) -> Batch | None:
        self._is_whole = False
        batch = self.scheduler.schedule()
        self._is_whole = True
        return batch

    def _run(self, batch: Batch) -> Logits:
        """Logits of the batch's rows, then of dummies: a decode step is run at a bucket's size."""
        padded = self._buckets.pad(batch) if self._buckets else None
        bounds = None if padded is None else padded.bounds
        step = padded or batch
        self._is_whole = False
        kv_inputs = self.kv.runtime_inputs(step.requests, batch_characteristics=bounds)
        self._is_whole = True
        return self.session.run(step.inputs, kv_inputs, capture=padded is not None)

    def _commit(self, outcome: Outcome) -> None:
        """Every request gets its token. Where this is interrupted, `_repair` does the rest."""
        self._is_whole = False
        self._outcome = outcome  # from here on the step has happened
        outcome.batch.update(outcome.tokens, outcome.reasons, outcome.forced)  # they grow first
        self.kv.step(outcome.batch.requests)  # then full pages join the prefix cache
        if any(outcome.reasons):
            self.scheduler.retire()
        self._record(outcome)
        self._is_whole = True

    def _record(self, outcome: Outcome) -> None:
        """The step's tokens are held for their callers: all at once, and once."""
        failed = 0
        if any(outcome.reasons):
            failed = outcome.reasons.count("error")
            for token in outcome.generated:
                if token.finish_reason:
                    self._open.pop(token.request_id, None)
        self._held, self._outcome, self._in_step = self._held + outcome.generated, None, False
        self.generated_tokens += len(outcome.generated) - failed
        self.failed_requests += failed

    # -- calls that did not end

    def _settle(self) -> None:
        """Repair what calls before this one left half done. May itself be interrupted."""
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
        """All bookkeeping from scratch: every open request starts over, with the tokens it has."""
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
            with shared(requests) as tell:
                while any(map(self._is_open, tokens)):
                    self._run_step()
                    own, self._held = self._held_apart(tokens)
                    for token in own:
                        tokens[token.request_id].append(token)
                    tell()
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
        """A request that can complete; changes nothing. RequestError as of `submit`."""
        if request_id is not None:
            instance("request_id", request_id, str, "text")
            self._require_new(request_id)
        name = self._new_id() if request_id is None else request_id
        return self._builder.request(name, prompt, sampling, cache_salt)

    def _queue(self, request: Request) -> None:
        self._is_whole = False
        self.scheduler.enqueue(request)
        self._open[request.request_id] = request
        self._is_whole = True

    def _end(self, request_id: str) -> None:
        """Stop the request if it runs, free its pages, and drop what is held of it."""
        held = self._held_apart([request_id])[1]
        self._is_whole = False
        self._held = held  # with the next line, no call between them: neither is done alone
        if self._open.pop(request_id, None) is not None:
            self.scheduler.cancel(request_id)
        self._is_whole = True

    @in_turn("stream")
    def _begin(self, request: Request) -> None:
        self._settle()
        self._require_new(request.request_id)
        self._queue(request)

    @in_turn("stream")
    def _step_for(self, ids: Collection[str]) -> list[Token]:
        """A step's tokens of `ids`; those of other requests are held for who asks for them."""
        self._run_step()
        own, self._held = self._held_apart(ids)
        return own

    def _leave(self) -> None:
        """What is abandoned is forgotten as soon as no call runs: a stream may be left at any time,
        by the collector of garbage too."""
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
        """Held tokens of `ids`, and the others."""
        own = [token for token in self._held if token.request_id in ids]
        return own, [token for token in self._held if token.request_id not in ids]

    def _is_open(self, request_id: str) -> bool:
        """Whether there are tokens of the request to come."""
        held = any(token.request_id == request_id for token in self._held)
        return held or request_id in self._open

    def _require_new(self, request_id: str) -> None:
        if self._is_open(request_id) or request_id in self._streamed:
            raise RequestError(f"request {request_id!r}: expected a new id, got one in use")

    def _new_id(self) -> str:
        return next(name for i in self._ids if not self._is_open(name := f"request-{i}"))
