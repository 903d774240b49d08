"""Engine: continuous batching over one artifact, from text to text."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from threading import get_ident

from kvgraph.contract.dims import BATCH_SIZE, TOTAL_SEQ_LEN
from kvgraph.contract.params import KVCacheStrategy
from kvgraph.contract.sizes import parse_bytes
from kvgraph.errors import GenerationError, RequestError
from kvgraph.kv.paged import PagedKVCacheManager
from kvgraph.runtime import artifact as artifacts
from kvgraph.runtime.arguments import (
    flag,
    instance,
    integer,
    one_for_each,
    optional_integer,
    sequence,
)
from kvgraph.runtime.artifact import Artifact
from kvgraph.runtime.buckets import DecodeBuckets, dummy_rows
from kvgraph.runtime.intake import Intake
from kvgraph.runtime.managers import make_manager
from kvgraph.runtime.outcome import Completion, Outcome, Token, completion_of, outcome_of
from kvgraph.runtime.prefix import Prefix, read_prefix
from kvgraph.runtime.sampling import Logits, SamplingParams
from kvgraph.runtime.scheduler import Batch, Request, Scheduler
from kvgraph.runtime.sessions.base import Session
from kvgraph.runtime.text import load_tokenizer
from kvgraph.runtime.tiers import DEFAULT_DISK_BYTES, tier_options
from kvgraph.runtime.turns import Turns, in_turn

DEFAULT_CACHE_BYTES = 1 << 30
"""Pool size where none is given; memory is only touched as pages are used."""

MOST_WAIT_SECONDS = 0.05
"""How long an engine without anything to run waits for tiers before it looks again."""


class Engine:
    """Runs ragged batches over an artifact: prefill, chunks and decode rows in one graph.

        engine = Engine("tiny.kvg")
        for piece in engine.stream("The import statement"):
            print(piece, end="", flush=True)

    `artifact` is a folder or a loaded Artifact. The pool has `num_pages` pages, of each
    leaf (default: what fits `cache_memory` bytes, or fewer where `max_batch_size` requests of
    maximum length need fewer; leaves with a window get what their windows need).
    `max_batch_tokens` bounds the new tokens of a step (default: the session's `step_tokens`); what
    was compiled may bound both further.
    `enable_prefix_caching` is on by default where the kind of cache can share pages. Over a padded
    cache requests run one after the other.

    Tiers hold pages that leave the pool: `total_num_host_pages` pages (of each leaf) or
    `host_memory` bytes of host memory, `disk_bytes` bytes in the folder `disk`, a server `remote`
    (a URL) that many machines share, and `prefixes`, the files of `kvgraph prefill`. An engine
    with tiers has threads: `close` it, or use it in a `with` statement. Sizes are bytes, or text
    such as "4GiB".

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
        num_pages: int | None = None,
        cache_memory: int | str = DEFAULT_CACHE_BYTES,
        max_batch_size: int = 64,
        max_batch_tokens: int | None = None,
        enable_prefix_caching: bool | None = None,
        num_threads: int | None = None,
        total_num_host_pages: int | None = None,
        host_memory: int | str = 0,
        disk: str | Path | None = None,
        disk_bytes: int | str = DEFAULT_DISK_BYTES,
        remote: str | None = None,
        prefixes: Sequence[str | Path | Prefix] = (),
    ) -> None:
        cache_memory = parse_bytes("cache_memory", cache_memory)
        host_memory = parse_bytes("host_memory", host_memory)
        disk_bytes = parse_bytes("disk_bytes", disk_bytes)
        prefixes = sequence("prefixes", "file", prefixes)
        max_batch_size = integer("max_batch_size", max_batch_size, 1)
        num_pages = optional_integer("num_pages", num_pages, 1)
        max_batch_tokens = optional_integer("max_batch_tokens", max_batch_tokens, 1)
        num_threads = optional_integer("num_threads", num_threads, 0)
        total_num_host_pages = optional_integer("total_num_host_pages", total_num_host_pages, 0)
        if not isinstance(artifact, Artifact):
            artifact = artifacts.load(artifact)
        self.artifact = artifact
        self.model = artifact.manifest.model
        if not isinstance(session, Session):
            session = artifact.session(session, num_threads=num_threads)
        self.session = session
        if enable_prefix_caching is not None:
            enable_prefix_caching = flag("enable_prefix_caching", enable_prefix_caching)
        else:
            enable_prefix_caching = artifact.params().cache_strategy is KVCacheStrategy.PAGED
        params = artifact.params(enable_prefix_caching=enable_prefix_caching)
        if params.cache_strategy is KVCacheStrategy.PADDED:
            max_batch_size = 1  # rows of a rectangle move in lockstep
        max_batch_size = min(max_batch_size, session.limits.get(BATCH_SIZE, max_batch_size))
        step_tokens = max_batch_tokens or session.step_tokens
        step_tokens = min(step_tokens, session.limits.get(TOTAL_SEQ_LEN, step_tokens))
        captures = session.captures and params.cache_strategy is KVCacheStrategy.PAGED
        self.kv = make_manager(
            params,
            session,
            num_pages,
            cache_memory,
            max_batch_size,
            step_tokens,
            self.model.max_seq_len,
            dummy_rows(max_batch_size) if captures else 0,
            tier_options(
                params,
                total_num_host_pages=total_num_host_pages,
                host_memory=host_memory,
                disk=disk,
                disk_bytes=disk_bytes,
                remote=remote,
                prefixes=[p if isinstance(p, Prefix) else read_prefix(p) for p in prefixes],
            ),
        )
        session.require_symbols(self.kv.input_symbols()[0])
        self._buckets: DecodeBuckets | None = None
        if captures:
            assert isinstance(self.kv, PagedKVCacheManager)
            self._buckets = DecodeBuckets(self.kv, max_batch_size, self.model.max_seq_len)
        self.scheduler = Scheduler(self.kv, max_batch_size, step_tokens)
        tokenizer = load_tokenizer(artifact.folder)
        self._intake = Intake(self.model, tokenizer, artifact.folder)
        self._turns = Turns("Engine")
        self._ids = itertools.count()
        self._open: dict[str, Request] = {}  # all that have not ended, in the order of arrival
        self._held: list[Token] = []  # not handed over yet
        self._left: deque[Request] = deque()  # that no caller waits for any more
        self._outcome: Outcome | None = None  # of a step that has happened and is not recorded yet
        self._is_whole = True  # scheduler and manager: False where a call that changes them stopped
        self._in_step = False  # a step has begun to run and is not recorded yet
        self.generated_tokens = 0
        self.failed_requests = 0
        self.repairs = 0

    @property
    def busy(self) -> bool:
        """Whether `step` has something to do, or tokens to give."""
        return bool(self._open or self._held or self._outcome)

    # -- the loop everything else is a footnote to

    def step(self) -> list[Token]:
        """Run one batch; the tokens that it generated, in row order.

        Before them come tokens of steps before it that no call has handed over.
        Empty when idle (see `busy`), and where a batch was nothing but chunks of prompts.
        """
        call = ("step", get_ident())
        try:
            self._turns.take(call)
            self._run_step()
            tokens = self._held
            self._held = []  # no call from here on, so no interrupt: the caller has them
            return tokens
        finally:
            if self._turns.running is call:
                del self._turns.running

    def _run_step(self) -> None:
        """One batch, whose tokens are held; nothing, where there is nothing to run."""
        if self._left or not self._is_whole or self._in_step:
            self._settle()
        batch = self._schedule()
        while batch is None and self.scheduler.busy:
            self.kv.wait(MOST_WAIT_SECONDS)  # all requests wait for pages from a tier
            batch = self._schedule()
        if batch is not None:
            self._in_step = True
            logits = self._run(batch)
            self._commit(outcome_of(batch, logits))
        if self._left:  # while the step ran
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
        """Stop a request and free its pages; an unknown id is a RequestError."""
        self._settle()
        instance("request_id", request_id, str, "text")
        if request_id not in self._open:
            raise RequestError(f"cancel of {request_id!r}: expected a submitted request, got none")
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
            while self._is_open(request.request_id):
                for token in self._step_for([request.request_id]):
                    if token.error:
                        raise GenerationError(token.error)
                    if token.text:
                        yield token.text
        finally:
            self._leave(request)

    @in_turn("generate")
    def generate(
        self,
        prompts: Sequence[str | Sequence[int]],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[Completion]:
        """Generate for all prompts together; completions in the prompts' order.

        RequestError as of `submit`, with the prompt's index, before any of them runs.
        """
        return self._generate(prompts, sampling)

    def tokenize(self, text: str, *, special_tokens: bool = True) -> list[int]:
        """Token ids of a prompt, with the special tokens that the model's tokenizer adds."""
        return self._intake.tokenize(text, special_tokens=special_tokens)

    @in_turn("close")
    def close(self) -> None:
        """Finish what is queued for the tiers, and let go of them. Idempotent."""
        self.kv.close()

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
        outcome.batch.update(outcome.tokens, outcome.reasons)  # requests grow first
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
            for token in outcome.said:
                if token.finish_reason:
                    self._open.pop(token.request_id, None)
        held = self._held + outcome.said
        self._held, self._outcome, self._in_step = held, None, False
        self.generated_tokens += len(outcome.said) - failed
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
        while self._left:
            self._forget(self._left[0])
            self._left.popleft()

    def _repair(self) -> None:
        """All bookkeeping from scratch: every open request starts over, with the tokens it has."""
        outcome = self._outcome
        if outcome is not None:
            for row, token, length in zip(
                outcome.batch.sampled, outcome.tokens, outcome.lengths, strict=True
            ):
                row.redo(token, length)
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
        requests = self._requests(prompts, sampling)
        tokens: dict[str, list[Token]] = {request.request_id: [] for request in requests}
        try:
            for request in requests:
                self._queue(request)
            while any(map(self._is_open, tokens)):
                self._run_step()
                for token in self._take(tokens):
                    tokens[token.request_id].append(token)
        finally:
            self._left.extend(requests)
            self._settle()
        return [completion_of(request_id, generated) for request_id, generated in tokens.items()]

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
        request_id = self._new_id() if request_id is None else request_id
        self._require_new(request_id)
        request = self._intake.request(request_id, prompt, sampling, cache_salt)
        self.scheduler.require_room(request)
        return request

    def _requests(
        self,
        prompts: Sequence[str | Sequence[int]],
        sampling: SamplingParams | Sequence[SamplingParams] | None,
    ) -> list[Request]:
        """Of each prompt one; of several, RequestError names the index of one that cannot be."""
        listed = sequence("prompts", "text", prompts)
        requests = []
        each = one_for_each("sampling", sampling, len(listed))
        for at, (prompt, params) in enumerate(zip(listed, each, strict=True)):
            try:
                requests.append(self._request(prompt, params))
            except RequestError as error:
                if len(listed) == 1:
                    raise
                raise RequestError(f"prompts[{at}]: {error}") from error
        return requests

    def _queue(self, request: Request) -> None:
        self._is_whole = False
        self.scheduler.enqueue(request)
        self._open[request.request_id] = request
        self._is_whole = True

    def _end(self, request_id: str) -> None:
        """Stop an open request and free its pages."""
        self._is_whole = False
        del self._open[request_id]
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
        return self._take(ids)

    def _leave(self, request: Request) -> None:
        """No caller waits for the request any more: it is forgotten as soon as no call runs.

        A stream may be left at any time: the collector of garbage closes one that has no reader.
        """
        self._left.append(request)
        call = ("stream", get_ident())
        try:
            if self._turns.try_take(call):
                self._settle()
        finally:
            if self._turns.running is call:
                del self._turns.running

    def _forget(self, request: Request) -> None:
        """Stop the request if it runs, and drop what is held of it."""
        request_id = request.request_id
        current = self._open.get(request_id, request)
        if current is request:
            self._held = [token for token in self._held if token.request_id != request_id]
            if request_id in self._open:
                self._end(request_id)

    def _take(self, ids: Collection[str]) -> list[Token]:
        """Held tokens of `ids`."""
        mine = [token for token in self._held if token.request_id in ids]
        others = [token for token in self._held if token.request_id not in ids]
        self._held = others
        return mine

    def _is_open(self, request_id: str) -> bool:
        """Whether there are tokens of the request to come."""
        held = any(token.request_id == request_id for token in self._held)
        return held or request_id in self._open

    def _require_new(self, request_id: str) -> None:
        if self._is_open(request_id):
            raise RequestError(f"request {request_id!r}: expected a new id, got one in use")

    def _new_id(self) -> str:
        return next(name for i in self._ids if not self._is_open(name := f"request-{i}"))
