"""AsyncEngine: one engine for all tasks of an event loop.

tasks of the loop --submissions, cancellations--> inbox --> the engine's thread: step, step, ...
      ^-------- all tokens of a step, in one call of the loop --------'
"""

from __future__ import annotations

import asyncio
import itertools
import os
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue
from threading import Thread
from typing import Any, TypeVar

from kvgraph.contract.not_copyable import NotCopyable
from kvgraph.contract.threads import threads_needed
from kvgraph.contract.tokenizer import LONG_TEXT, is_panic
from kvgraph.errors import (
    ArtifactError,
    DeviceLostError,
    GenerationError,
    RankError,
    RequestError,
)
from kvgraph.runtime.arguments import instance, optional_integer
from kvgraph.runtime.engine import Engine
from kvgraph.runtime.engine_calls import answer, running_loop
from kvgraph.runtime.request_threads import RequestThreads
from kvgraph.runtime.sampling import SamplingParams, Token
from kvgraph.runtime.scheduler import Request
from kvgraph.runtime.text import Completion, completion_of
from kvgraph.runtime.token_stream import ENDED, STOPPED, TokenStream, failed

T = TypeVar("T")

WATCH_SECONDS = 1.0
"""Interval at which an idle engine checks that its ranks are alive."""

LOST = (RankError, DeviceLostError, ArtifactError)
"""Errors after which no step can run."""


class AsyncEngine(NotCopyable):
    """Runs an engine in its own thread, for the tasks of one event loop.

        async with AsyncEngine(Engine("tiny.kvg")) as engine:
            async for piece in engine.stream("The import statement"):
                print(piece, end="", flush=True)

    The engine belongs to that thread from `start` (or `async with`) to `close`. Leaving a stream
    cancels its request. A step that raises is tried again; if it raises twice, all open requests
    end with finish_reason "error", and the engine continues with new requests. A lost rank or a
    lost device ends the engine. A program that ends without `close` waits for the running step.
    """

    def __init__(self, engine: Engine) -> None:
        instance("engine", engine, Engine, "an Engine, as Engine(path) makes one")
        self.engine = engine
        self.before_step: Callable[[], None] = lambda: None
        """Called in the engine's thread before each step."""
        self.after_step: Callable[[list[Token]], None] = lambda tokens: None
        """Called in the engine's thread after each step with its tokens; also called with an
        empty list if a cancellation leaves no request to run."""
        self.after_failure: Callable[[BaseException], object] = lambda error: None
        """Called on the event loop where the thread has ended before `close`."""
        self._inbox: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._streams: dict[str, TokenStream] = {}
        self._cancelled_ids: dict[str, asyncio.Future[None]] = {}
        """Cancelled requests that may still receive tokens of the running step, by id."""
        self._calls: set[Future[Any]] = set()
        self._ids = itertools.count()
        self._building = RequestThreads()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: Thread | None = None
        self._is_closed = False  # set by a task: no more submissions
        self._is_stopped = False  # set in the thread: no more steps
        self._ended: Future[None] = Future()  # done when the thread has ended
        self._failure: BaseException | None = None  # ended the thread, if `close` did not
        self._process = 0  # in which the thread runs

    # -- for tasks of the loop

    async def start(self) -> None:
        """Start the engine's thread. RequestError if the engine was started before, or outside a
        task of asyncio.

        CapacityError if the system refuses a thread; the engine can be started again.
        """
        if self._thread is not None or self.engine._is_shared:
            raise RequestError("AsyncEngine.start: the engine was started already")
        if self._is_closed or self.engine._turns.is_ended:
            raise RequestError(
                "AsyncEngine.start: expected an engine that is open, got a closed one"
            )
        self._loop, self._process = running_loop("start"), os.getpid()
        self.engine._is_shared = True
        self._thread = Thread(target=self._run, name="kvgraph-engine", daemon=True)
        try:
            with threads_needed():
                self._thread.start()
        except BaseException:
            if self._thread.ident is None:  # an interrupt may come once the thread runs
                self._thread, self.engine._is_shared = None, False
            raise

    async def close(self) -> None:
        """End the thread and close the engine. Open requests end with finish_reason "error".

        A forked child only leaves the engine, which runs in the parent.
        """
        self._is_closed = True
        if self._thread is not None and self._process != os.getpid():
            return
        for stream in list(self._streams.values()):
            stream.cancel()
            self._give(stream, [failed(stream.request_id, "the engine was closed")])
        self._building.close()
        if self._thread is None:
            self.engine.close()
        else:
            self._inbox.put(self._stop)
            await asyncio.shield(asyncio.wrap_future(self._ended))  # other tasks may wait for it
            self._thread.join()

    async def __aenter__(self) -> AsyncEngine:
        await self.start()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    def __repr__(self) -> str:
        state = "closed" if self.is_closed else "not started" if self._thread is None else "running"
        return f"<AsyncEngine {self.engine.artifact.folder.name}: {state}, {self.num_open} open>"

    @property
    def num_open(self) -> int:
        """Number of requests that have not ended."""
        return len(self._streams)

    @property
    def is_closed(self) -> bool:
        return self._is_closed or self._is_stopped

    async def submit(
        self,
        prompt: str | Sequence[int],
        sampling: SamplingParams | None = None,
        *,
        request_id: str | None = None,
        cache_salt: bytes = b"",
        most_unread: int | None = None,
        news: asyncio.Event | None = None,
    ) -> TokenStream:
        """Queue a prompt (text or token ids). RequestError as in `Engine.submit`, at once.

        `most_unread`: a stream with more unread tokens is cancelled, and its last token has
        finish_reason "error": its reader is too slow. Tokens of the latest step do not count, as
        a grammar may force many. A stream whose last token has come is never cancelled.
        """
        self._require_running("submit")
        if request_id is None:
            request_id = f"async-{next(self._ids)}"
        instance("request_id", request_id, str, "text")
        most_unread = optional_integer("most_unread", most_unread, 0)
        if news is not None:
            instance("news", news, asyncio.Event, "an asyncio.Event")
        if isinstance(prompt, str) and len(prompt) > LONG_TEXT:
            prompt = await self._building.tokenize(partial(self.engine.tokenize, prompt))
        given = request_id, prompt, sampling, cache_salt
        if isinstance(sampling, SamplingParams) and sampling.grammar is not None:
            request = await self._building.compile(partial(self.engine._builder.request, *given))
        else:
            request = self.engine._builder.request(*given)
        while (leaving := self._cancelled_ids.get(request_id)) is not None:
            await asyncio.shield(leaving)
        self._require_running("submit")
        if request_id in self._streams:
            raise RequestError(f"request {request_id!r}: expected a new id, got one in use")
        stream = self._streams[request_id] = TokenStream(
            request_id, request.stats, self._cancel, most_unread, news
        )
        self._inbox.put(lambda: self._begin(request))
        return stream

    async def stream(
        self, prompt: str | Sequence[int], sampling: SamplingParams | None = None
    ) -> AsyncIterator[str]:
        """Yield pieces of text as they come. Leaving early cancels the request.

        GenerationError if this request fails.
        """
        stream = await self.submit(prompt, sampling)
        try:
            async for tokens in stream:
                if text := "".join([token.text for token in tokens]):
                    yield text
                if error := tokens[-1].error:
                    raise GenerationError(error)
        finally:
            stream.cancel()

    async def generate(
        self, prompt: str | Sequence[int], sampling: SamplingParams | None = None
    ) -> Completion:
        """Generate for one prompt; prompts of several tasks run together."""
        stream = await self.submit(prompt, sampling)
        generated: list[Token] = []
        try:
            async for tokens in stream:
                generated += tokens
        finally:
            stream.cancel()
        about_prompt = generated[0].prompt_logprobs
        return completion_of(stream.request_id, generated, stream.stats, 0, about_prompt)

    async def call(self, function: Callable[[Engine], T]) -> T:
        """Call `function` with the engine, in its thread between two steps; return its result."""
        found: Future[T] = Future()
        self._require_running("call")
        self._calls.add(found)
        found.add_done_callback(self._calls.discard)
        self._inbox.put(partial(answer, found, function, self.engine))
        return await asyncio.wrap_future(found)

    def _require_running(self, call: str) -> None:
        if self._thread is None or self._is_closed or self._is_stopped:
            raise RequestError(f"AsyncEngine.{call}: {STOPPED}{self._why()}")
        if self._process != os.getpid():
            raise RequestError(
                f"AsyncEngine.{call}: expected the process of `start`, got a fork of it"
            )
        if self._loop is not running_loop(call):
            raise RequestError(
                f"AsyncEngine.{call}: expected the event loop of `start`, got another one"
            )

    def _cancel(self, stream: TokenStream) -> None:
        request_id = stream.request_id
        if self._streams.get(request_id) is not stream:  # it has ended; the id may be another's
            return
        del self._streams[request_id]
        assert self._loop is not None
        if not self._is_stopped:
            self._cancelled_ids[request_id] = self._loop.create_future()
        self._inbox.put(lambda: self._end(request_id, is_told=True))

    def _release_id(self, request_id: str) -> None:
        """Release the id of a cancelled request: none of its tokens can come any more."""
        leaving = self._cancelled_ids.pop(request_id, None)
        if leaving is not None and not leaving.done():
            leaving.set_result(None)

    def _why(self) -> str:
        return "" if self._failure is None else f": {_said(self._failure)}"

    def _end_all(self, why: str) -> None:
        """End every stream, cancellation and call that waits for the ended thread."""
        for request_id, stream in list(self._streams.items()):
            del self._streams[request_id]
            self._give(stream, [failed(request_id, why)])
        for request_id in list(self._cancelled_ids):
            self._release_id(request_id)
        for call in list(self._calls):
            if call.set_running_or_notify_cancel():
                call.set_exception(RequestError(f"AsyncEngine.call: {why}"))
        if self._failure is not None:
            self.after_failure(self._failure)

    def _deliver(self, tokens: Sequence[Token]) -> None:
        """Give each stream its tokens of a step; drop tokens of cancelled requests."""
        given: dict[str, list[Token]] = {}
        for token in tokens:
            given.setdefault(token.request_id, []).append(token)
        for request_id, mine in given.items():
            if (stream := self._streams.get(request_id)) is not None:
                if mine[-1].finish_reason:
                    del self._streams[request_id]
                self._give(stream, mine)

    def _give(self, stream: TokenStream, tokens: list[Token]) -> None:
        """Give tokens to a stream. An error of its `watch` goes to the event loop's handler."""
        assert self._loop is not None
        try:
            stream.give(tokens)
        except Exception as error:
            message = f"request {stream.request_id!r}: its watch failed"
            self._loop.call_exception_handler({"message": message, "exception": error})

    # -- in the engine's thread

    def _run(self) -> None:
        """Run steps while there are requests; handle the inbox before each step.

        An error outside a step, such as in `after_step`, ends the thread and all requests; so does
        a lost rank or device.
        """
        try:
            with self.engine._turns.owned():
                self._run_owned()
        finally:
            self._ended.set_result(None)

    def _run_owned(self) -> None:
        try:
            self._step_until_stopped()
        except BaseException as error:
            self._failure, self._is_stopped = error, True
        while not self._inbox.empty():
            with suppress(Exception):
                self._inbox.get()()
        self._call_in_loop(self._end_all, f"{ENDED}{self._why()}")
        with suppress(Exception):  # requests that were cancelled since the last step
            self.engine._settle()
        self.engine.close()

    def _step_until_stopped(self) -> None:
        raised = False
        while self._handle_inbox():
            self.before_step()
            try:
                tokens = self.engine.step()
                raised = False
            except LOST:
                raise
            except BaseException as error:
                if not isinstance(error, Exception) and not is_panic(error):
                    raise
                tokens = self._fail_all(error) if raised else []
                raised = not raised
            self.after_step(tokens)
            self._post_tokens(tokens)

    def _handle_inbox(self) -> bool:
        """Handle the inbox; wait while no request is open. False once the engine must stop."""
        watch = WATCH_SECONDS if self.engine.artifact.ranks > 1 else None
        while not self._is_stopped:
            is_busy = self.engine.busy
            try:
                handle = self._inbox.get(block=not is_busy, timeout=watch)
            except Empty:
                if is_busy:
                    return True
                self.engine.session.require_ranks()
                continue
            handle()
        return False

    def _begin(self, request: Request) -> None:
        try:
            self.engine._begin(request)
        except LOST:
            raise
        except Exception as error:
            self._post_tokens([failed(request.request_id, str(error))])

    def _end(self, request_id: str, *, is_told: bool = False) -> None:
        """Stop a request; the next step does it if this raises. `is_told`: release its id first."""
        if is_told:
            self._call_in_loop(self._release_id, request_id)
        if (request := self.engine._open.get(request_id)) is not None:
            with suppress(Exception):
                self.engine._abandoned.append(request)
                self.engine._leave()
            if not self.engine.busy:
                self.after_step([])

    def _stop(self) -> None:
        self._is_stopped = True

    def _fail_all(self, error: BaseException) -> list[Token]:
        """End every open request, since its step has failed twice; return their last tokens."""
        why = f"a step failed twice: {type(error).__name__}: {error}"
        ended = []
        for request_id in list(self.engine._open):
            self._end(request_id)
            ended.append(failed(request_id, why))
        return ended

    def _post_tokens(self, tokens: Sequence[Token]) -> None:
        if tokens:
            self._call_in_loop(self._deliver, tokens)

    def _call_in_loop(self, call: Callable[[T], object], what: T) -> None:
        """Schedule `call(what)` on the event loop, in order."""
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(call, what)
        except RuntimeError:  # the loop is closed: no task is left to read
            self._is_stopped = True


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"
