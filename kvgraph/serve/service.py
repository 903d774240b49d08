"""Service: opens an engine in the background, provides it to the routes, and closes it."""

from __future__ import annotations

import asyncio
import os
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kvgraph.contract.dims import ceildiv
from kvgraph.contract.not_copyable import NotCopyable
from kvgraph.contract.plain import JsonObject
from kvgraph.contract.tokenizer import LONG_TEXT, byte_pieces, most_characters
from kvgraph.errors import ArtifactError, RequestError
from kvgraph.kv.paged import PagedKVCacheManager
from kvgraph.progress import listening
from kvgraph.runtime.async_engine import AsyncEngine
from kvgraph.runtime.chat import Prompts
from kvgraph.runtime.engine import Engine
from kvgraph.runtime.text import Alphabet, TextStream
from kvgraph.serve.answers import Spelling
from kvgraph.serve.errors import ServeError, require_vocabulary, too_long
from kvgraph.serve.facts import EngineFacts, facts_of
from kvgraph.serve.generation import Submits
from kvgraph.serve.imports import import_for_requests
from kvgraph.serve.latency import keep_heap, make_behind, step_behind
from kvgraph.serve.load import Admission, Load, LoadMeter
from kvgraph.serve.log import LinesOfTasks
from kvgraph.serve.metrics import Metrics
from kvgraph.serve.options import ServeOptions
from kvgraph.serve.state import state_of

if TYPE_CHECKING:
    from kvgraph.runtime.sampling import Token
    from kvgraph.serve.kv_events import KVEventPublisher


MOST_LONG_TEXTS = 2
"""Most long texts that are tokenized at a time: one takes up to 200 times its size in memory."""


@dataclass(slots=True)
class Served:
    """A loaded engine or fleet, with all that the routes need of it."""

    prompts: Prompts
    runner: Submits
    facts: EngineFacts
    state: Callable[[], Awaitable[dict[str, object]]]
    """Returns the data on running requests for the page at /."""
    admission: Admission
    metrics: Metrics
    spell: Spelling
    sampling: JsonObject
    """Default fields of SamplingParams, for requests that do not set them."""
    _most_characters: int | None = None
    """Most characters of one token; None: unknown."""
    _long_texts: asyncio.Semaphore = field(
        default_factory=lambda: asyncio.Semaphore(MOST_LONG_TEXTS)
    )

    async def tokenize(
        self,
        text: str,
        special_tokens: bool = True,
        *,
        about: str = "prompt",
        most: int | None = None,
        is_long: bool | None = None,
    ) -> list[int]:
        """Tokenize on the event loop; in a thread if `is_long` (None: by the text's length).

        ServeError about field `about` for text that is not Unicode, and, before tokenizing, for
        text that must have more than `most` tokens. `is_long`: for one of several texts, whether
        they are long together.
        """
        if is_long is None:
            is_long = len(text) > LONG_TEXT
        if not is_long:
            return self._tokenized(text, special_tokens, about, most)
        async with self._long_texts:
            return await asyncio.to_thread(self._tokenized, text, special_tokens, about, most)

    def _tokenized(
        self, text: str, special_tokens: bool, about: str, most: int | None
    ) -> list[int]:
        if most is not None and self._most_characters and len(text) > most * self._most_characters:
            least = ceildiv(len(text), self._most_characters)
            raise too_long(about, most, f"a text of at least {least}")
        try:
            return self.prompts.tokenize(text, special_tokens=special_tokens)
        except (RequestError, ArtifactError) as error:
            raise ServeError(400, self.without_folder(error), param=about) from error

    def require_chats(self) -> None:
        """Raise ServeError if the artifact lacks a file that chats need."""
        if missing := self.prompts.missing_chat_file:
            sentence = f"messages: expected a model with {missing}, got none; use /v1/completions"
            raise ServeError(400, sentence, param="messages")

    def without_folder(self, error: Exception) -> str:
        """What `error` says, without the artifact's folder, which is not for clients."""
        folder = self.prompts.folder
        return str(error).replace(f"{folder}{os.sep}", "").replace(f"{folder}: ", "")

    def detokenize(
        self, tokens: list[int], *, special_tokens: bool = True, about: str = "tokens"
    ) -> str:
        """Decode tokens. ServeError about field `about` without a tokenizer, or for unknown ids."""
        tokenizer = self._tokenizer(about)
        if tokens:
            self.require_known(about, tokens)
        # `decode` would hold Python's lock, and block other threads.
        (text,) = tokenizer.decode_batch([tokens], skip_special_tokens=not special_tokens)
        return str(text)

    def require_known(self, about: str, tokens: list[int]) -> None:
        """Raise ServeError about field `about` for an empty list, or a token id out of range."""
        if not tokens:
            raise ServeError(400, f"{about}: expected a prompt, got an empty one", param=about)
        require_vocabulary(about, max(tokens), self.facts.vocab_size)

    def offsets_of_ids(self, tokens: list[int], text: str) -> list[int]:
        """Start of each token of a prompt of token ids in their decoded `text`, in characters.

        Special tokens have no width. A character that several tokens form starts at the last of
        them.
        """
        stream = TextStream(Alphabet(self._tokenizer("prompt")), 0)
        stream.begin()
        offsets, at = [], 0
        for token in tokens:
            offsets.append(min(at, len(text)))
            at += len(stream.step(token))
        return offsets

    async def offsets_in(self, text: str) -> list[int]:
        """Start of each token of a prompt in its `text` as given, in characters. The tokens may
        spell it differently. Tokens that the tokenizer adds have no width."""
        if len(text) <= LONG_TEXT:
            return await asyncio.to_thread(self._offsets_in, text)
        async with self._long_texts:
            return await asyncio.to_thread(self._offsets_in, text)

    def _offsets_in(self, text: str) -> list[int]:
        (found,) = self._tokenizer("prompt").encode_batch([text])
        offsets, at = [], 0
        for (start, end), is_added in zip(found.offsets, found.special_tokens_mask, strict=True):
            # A token may begin after the space that belongs to it.
            begin = min(start, at + len(text[at:start].rstrip()))
            offsets.append(at if is_added else begin)
            at = max(at, end)
        return offsets

    def _tokenizer(self, about: str) -> Any:
        if (tokenizer := self.prompts.tokenizer) is None:
            sentence = f"{about}: expected an artifact with a tokenizer, got none"
            raise ServeError(400, sentence, param=about)
        return tokenizer


class Service(ABC):
    """Base of what a server serves; it is opened while the server already answers."""

    def __init__(self, name: str, options: ServeOptions) -> None:
        self.name = name
        self.options = options
        self.served: Served | None = None
        self.is_draining = False
        self.after_failure: Callable[[BaseException], object] = lambda error: None
        """Called if no request can run any more."""

    @abstractmethod
    async def load(self) -> None:
        """Open the engine, and set `served`."""

    @abstractmethod
    async def close(self) -> None: ...

    @abstractmethod
    def hurry(self) -> None:
        """Make `close` skip all work that can be skipped."""

    def serve(
        self,
        prompts: Prompts,
        runner: Submits,
        facts: EngineFacts,
        load: Callable[[], Load],
        state: Callable[[], Awaitable[dict[str, object]]],
    ) -> None:
        """Set `served`: from now on requests are served."""
        metrics = Metrics(self.options.metrics_prefix, self.name, facts, lambda: load().stats)
        admission = Admission(facts, self.options, load)
        tokenizer = prompts.tokenizer
        spell = Spelling(_decoder(prompts), byte_pieces(tokenizer))
        most = None if tokenizer is None else most_characters(tokenizer)
        sampling = prompts.suggested_fields() if self.options.uses_generation_config else {}
        self.served = Served(
            prompts, runner, facts, state, admission, metrics, spell, sampling, most
        )

    def require_loaded(self) -> Served:
        """Return `served`; ServeError (503) while it is loading."""
        if self.served is None:
            raise ServeError(503, "the artifact is being loaded; try again")
        return self.served

    def require_ready(self) -> Served:
        """Return `served`; ServeError (503) while it is loading, and once the server drains."""
        if self.is_draining:
            raise ServeError(503, "the server takes no more requests: it ends")
        return self.require_loaded()

    @property
    def num_open(self) -> int:
        return 0 if self.served is None else self.served.admission.num_open


class EngineService(Service, NotCopyable):
    """Serves one engine of this process. `make` creates it in a thread, meanwhile requests are
    answered."""

    def __init__(self, name: str, make: Callable[[], Engine], options: ServeOptions) -> None:
        super().__init__(name, options)
        self.engine: AsyncEngine | None = None
        self._make = make
        self._events: KVEventPublisher | None = None

    async def load(self) -> None:
        with listening(LinesOfTasks()):
            engine = await make_behind(self._make, self.options.nice, Engine.close)
        self.engine = shared = AsyncEngine(engine)  # from here on `close` closes it
        shared.after_failure = lambda error: self.after_failure(error)
        meter = LoadMeter(engine)
        shared.before_step, shared.after_step = meter.before_step, meter.after_step
        self._events = _publisher(engine, self.options)
        if self._events is not None:
            shared.after_step = _both(meter, engine, self._events)
        facts = facts_of(engine)
        await make_behind(import_for_requests, 0)
        await shared.start()
        await step_behind(shared, self.options.nice)

        def load() -> Load:
            return meter.load

        self.serve(engine, shared, facts, load, lambda: state_of(shared, load()))
        keep_heap()

    async def close(self) -> None:
        if self.engine is not None:
            await self.engine.close()
        if self._events is not None:
            self._events.close()  # in no other thread: the system may refuse one

    def hurry(self) -> None:
        """Drop pages that are queued for tiers."""
        kv = None if self.engine is None else self.engine.engine.kv
        if isinstance(kv, PagedKVCacheManager):
            kv.drop_queued_pages()


def _decoder(prompts: Prompts) -> Callable[[list[int]], str]:
    tokenizer: Any = prompts.tokenizer
    if tokenizer is None:
        return lambda tokens: "".join([f"token_id:{token}" for token in tokens])
    return lambda tokens: tokenizer.decode(tokens, skip_special_tokens=False)


def _publisher(engine: Engine, options: ServeOptions) -> KVEventPublisher | None:
    """The publisher of KV events; None if not configured. RequestError for a cache without prefix
    caching, and for an endpoint that is not free."""
    if options.kv_events is None:
        return None
    if not isinstance(engine.kv, PagedKVCacheManager) or not engine.kv.params.enable_prefix_caching:
        raise RequestError("--kv-events: expected a paged cache with prefix caching, got none")
    from kvgraph.serve.kv_events import KVEventPublisher

    kind = engine.kv.params.devices[0].kind
    publisher = KVEventPublisher(
        options.kv_events,
        options.kv_events_replay,
        options.kv_events_topic,
        engine.kv.params.page_size,
        "GPU" if kind == "cuda" else None,
    )
    engine.kv.follow()
    return publisher


def _both(
    meter: LoadMeter, engine: Engine, events: KVEventPublisher
) -> Callable[[list[Token]], None]:
    kv = engine.kv
    assert isinstance(kv, PagedKVCacheManager)

    def after_step(tokens: list[Token]) -> None:
        events.publish(kv.events())
        meter.after_step(tokens)

    return after_step
