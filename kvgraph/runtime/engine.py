"""Engine: continuous batching over one artifact, from text to text."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kvgraph.contract.dims import BATCH_SIZE, TOTAL_SEQ_LEN
from kvgraph.contract.params import KVCacheParams, KVCacheStrategy
from kvgraph.contract.tokenizer import NAME, encode, read_tokenizer
from kvgraph.contract.trees import MultiKVCacheParams
from kvgraph.errors import ArtifactError, RequestError
from kvgraph.kv.continuous import ContinuousBatchingKVCacheManager
from kvgraph.kv.manager import KVCacheManager
from kvgraph.kv.memory import plan_leaves
from kvgraph.kv.padded import PaddedKVCacheManager
from kvgraph.kv.paged import PagedKVCacheManager
from kvgraph.kv.requests import TextContext
from kvgraph.runtime import artifact as artifacts
from kvgraph.runtime.artifact import Artifact
from kvgraph.runtime.buckets import DecodeBuckets, dummy_rows
from kvgraph.runtime.prefix import Prefix, read_prefix
from kvgraph.runtime.sampling import SamplingParams, TokenSource, sample
from kvgraph.runtime.scheduler import Batch, FinishReason, Request, Scheduler
from kvgraph.runtime.sessions.base import Session
from kvgraph.runtime.tiers import DEFAULT_DISK_BYTES, tier_options

DEFAULT_CACHE_BYTES = 1 << 30
"""Pool size where none is given; memory is only touched as pages are used."""

MOST_WAIT_SECONDS = 0.05
"""How long an engine without anything to run waits for tiers before it looks again."""

SEEN_BY_DECODER = 8
"""Tokens of the prompt that decide how the first generated ones read."""


class Token(NamedTuple):
    """One generated token, and with the last one why its request ended."""

    request_id: str
    token_id: int
    text: str
    finish_reason: FinishReason | None


@dataclass(frozen=True, slots=True)
class Completion:
    """A finished request: what was generated behind the prompt."""

    request_id: str
    token_ids: list[int]
    text: str
    finish_reason: FinishReason


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
    with tiers has threads: `close` it, or use it in a `with` statement.
    Not thread-safe.
    """

    def __init__(
        self,
        artifact: str | Path | Artifact,
        *,
        session: str | Session | None = None,
        num_pages: int | None = None,
        cache_memory: int = DEFAULT_CACHE_BYTES,
        max_batch_size: int = 64,
        max_batch_tokens: int | None = None,
        enable_prefix_caching: bool | None = None,
        num_threads: int | None = None,
        total_num_host_pages: int | None = None,
        host_memory: int = 0,
        disk: str | Path | None = None,
        disk_bytes: int = DEFAULT_DISK_BYTES,
        remote: str | None = None,
        prefixes: Sequence[str | Path | Prefix] = (),
    ) -> None:
        if not isinstance(artifact, Artifact):
            artifact = artifacts.load(artifact)
        if max_batch_tokens is not None and max_batch_tokens < 1:
            raise RequestError(f"max_batch_tokens: expected >= 1, got {max_batch_tokens}")
        self.artifact = artifact
        self.model = artifact.manifest.model
        if not isinstance(session, Session):
            session = artifact.session(session, num_threads=num_threads)
        self.session = session
        if enable_prefix_caching is None:
            enable_prefix_caching = artifact.params().cache_strategy is KVCacheStrategy.PAGED
        params = artifact.params(enable_prefix_caching=enable_prefix_caching)
        if params.cache_strategy is KVCacheStrategy.PADDED:
            max_batch_size = 1  # rows of a rectangle move in lockstep
        max_batch_size = min(max_batch_size, session.limits.get(BATCH_SIZE, max_batch_size))
        step_tokens = max_batch_tokens or session.step_tokens
        step_tokens = min(step_tokens, session.limits.get(TOTAL_SEQ_LEN, step_tokens))
        captures = session.captures and params.cache_strategy is KVCacheStrategy.PAGED
        self.kv = _make_manager(
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
        self._tokenizer = _load_tokenizer(artifact.folder)
        self._decoders: dict[str, Any] = {}
        # Tokens of other requests that steps of `stream` and `generate` came upon.
        self._held: list[Token] = []
        self._ids = itertools.count()
        self.generated_tokens = 0

    @property
    def busy(self) -> bool:
        """Whether `step` has something to do, or tokens to give."""
        return bool(self._decoders or self._held)

    # -- the loop everything else is a footnote to

    def step(self) -> list[Token]:
        """Run one batch; the tokens that it generated, in row order.

        Before them come the tokens of submitted requests that `stream` or `generate` came upon.
        Empty when idle (see `busy`), and where a batch was nothing but chunks of prompts.
        """
        batch = self.scheduler.schedule()
        while batch is None and self.scheduler.busy:
            self.kv.wait(MOST_WAIT_SECONDS)  # all requests wait for pages from a tier
            batch = self.scheduler.schedule()
        if batch is None:
            return self._take_held()
        logits = self._run(batch)
        tokens = sample(logits[: len(batch.sampled)], [row.source for row in batch.sampled])
        batch.update(tokens)  # requests grow first
        self.kv.step(batch.requests)  # then full pages join the prefix cache
        self.generated_tokens += len(tokens)
        generated = self._tokens(batch.sampled, tokens)
        self.scheduler.retire()
        return self._take_held() + generated

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
        RequestError: an empty prompt, one that leaves no room below the model's `max_seq_len`, or
        one that the whole pool cannot hold with its output.
        """
        sampling = sampling or SamplingParams()
        # An empty text is empty even where the tokenizer puts a token of its own in front.
        text = isinstance(prompt, str) and prompt != ""
        tokens = self.tokenize(str(prompt)) if text else _token_ids(prompt)
        request_id = self._new_id() if request_id is None else request_id
        if self._is_open(request_id):
            raise RequestError(f"request {request_id!r}: expected a new id, got one in use")
        self._check(request_id, tokens)
        stops = set(sampling.stop_token_ids)
        if not sampling.ignore_eos:
            stops |= set(self.model.eos_token_ids)
        length = min(len(tokens) + sampling.max_new_tokens, self.model.max_seq_len)
        self.scheduler.submit(
            Request(
                TextContext(request_id, tokens, cache_salt=cache_salt),
                TokenSource(sampling),
                frozenset(stops),
                length,
            )
        )
        self._decoders[request_id] = _decode_stream(self._tokenizer, tokens)
        return request_id

    def cancel(self, request_id: str) -> None:
        """Stop a request and free its pages; an unknown id is a RequestError."""
        if not self.scheduler.cancel(request_id):
            raise RequestError(f"cancel of {request_id!r}: expected a submitted request, got none")
        del self._decoders[request_id]

    def stream(
        self, prompt: str | Sequence[int], sampling: SamplingParams | None = None
    ) -> Iterator[str]:
        """Generate for one prompt; pieces of text as they come. Leaving early cancels it."""
        request_id = self.submit(prompt, sampling)
        try:
            while self._is_open(request_id):
                for token in self._step_for([request_id]):
                    if token.text:
                        yield token.text
        finally:
            self._forget(request_id)

    def generate(
        self,
        prompts: Sequence[str | Sequence[int]],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[Completion]:
        """Generate for all prompts together; completions in the prompts' order."""
        if isinstance(prompts, str):
            raise RequestError("prompts: expected a sequence of prompts, got one text; use [text]")
        each = [sampling] * len(prompts) if not isinstance(sampling, Sequence) else sampling
        tokens: dict[str, list[Token]] = {}
        try:
            for prompt, params in zip(prompts, each, strict=True):
                tokens[self.submit(prompt, params)] = []
            while any(map(self._is_open, tokens)):
                for token in self._step_for(tokens):
                    tokens[token.request_id].append(token)
        finally:
            for request_id in tokens:
                self._forget(request_id)
        return [_completion(request_id, generated) for request_id, generated in tokens.items()]

    def tokenize(self, text: str, *, special_tokens: bool = True) -> list[int]:
        """Token ids of a prompt, with the special tokens that the model's tokenizer adds."""
        if self._tokenizer is None:
            raise ArtifactError(
                f"{self.artifact.folder}: expected tokenizer.json for a text prompt, got none; "
                "pass token ids"
            )
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RequestError(f"prompt: expected text in Unicode, got {error}") from error
        path = self.artifact.folder / NAME
        return encode(self._tokenizer, text, path, ArtifactError, special_tokens=special_tokens)

    def close(self) -> None:
        """Finish what is queued for the tiers, and let go of them. Idempotent."""
        self.kv.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _run(self, batch: Batch) -> npt.NDArray[np.float32]:
        """Logits of the batch's rows, then of dummies: a decode step is run at a bucket's size."""
        padded = self._buckets.pad(batch) if self._buckets else None
        if padded is None:
            return self.session.run(batch.inputs, self.kv.runtime_inputs(batch.requests))
        kv_inputs = self.kv.runtime_inputs(padded.requests, batch_characteristics=padded.bounds)
        return self.session.run(padded.inputs, kv_inputs, capture=True)

    def _step_for(self, ids: Collection[str]) -> list[Token]:
        """A step's tokens of `ids`; those of other requests are held for who asks for them."""
        tokens = self.step()
        self._held = [token for token in tokens if token.request_id not in ids]
        return [token for token in tokens if token.request_id in ids]

    def _take_held(self) -> list[Token]:
        tokens, self._held = self._held, []
        return tokens

    def _is_open(self, request_id: str) -> bool:
        """Whether there are tokens of the request to come."""
        held = any(token.request_id == request_id for token in self._held)
        return held or request_id in self._decoders

    def _forget(self, request_id: str) -> None:
        """Cancel the request if it runs, and drop what was held of it."""
        self._held = [token for token in self._held if token.request_id != request_id]
        if request_id in self._decoders:
            self.cancel(request_id)

    def _new_id(self) -> str:
        return next(name for i in self._ids if not self._is_open(name := f"request-{i}"))

    def _check(self, request_id: str, tokens: list[int]) -> None:
        if not tokens:
            raise RequestError(f"request {request_id!r}: expected a prompt, got an empty one")
        limit = self.model.max_seq_len - 1
        if len(tokens) > limit:
            raise RequestError(
                f"request {request_id!r}: expected a prompt of at most {limit} tokens (the "
                f"model's max_seq_len is {limit + 1}), got {len(tokens)}"
            )
        low, high = min(tokens), max(tokens)
        if low < 0 or high >= self.model.vocab_size:
            raise RequestError(
                f"request {request_id!r}: expected token ids in [0, {self.model.vocab_size}), "
                f"got {low if low < 0 else high}"
            )

    def _tokens(self, rows: Sequence[Request], tokens: Sequence[int]) -> list[Token]:
        """Each row's token with the text that it completes; ended requests lose their decoder."""
        generated = []
        for row, token in zip(rows, tokens, strict=True):
            request_id, text = row.request_id, ""
            decoder = self._decoders[request_id]
            if decoder is not None and token not in row.stop_tokens:
                text = decoder.step(self._tokenizer, token) or ""
            if row.finish_reason:
                del self._decoders[request_id]
            generated.append(Token(request_id, token, text, row.finish_reason))
        return generated


def _token_ids(prompt: Sequence[int] | str) -> list[int]:
    if isinstance(prompt, bytes):
        raise RequestError("prompt: expected text or token ids, got bytes")
    try:
        return [operator.index(token) for token in prompt]  # type: ignore[arg-type]
    except TypeError as error:
        raise RequestError(f"prompt: expected text or token ids, got {error}") from error


def _make_manager(
    params: KVCacheParams | MultiKVCacheParams,
    session: Session,
    num_pages: int | None,
    cache_memory: int,
    max_batch_size: int,
    max_batch_tokens: int,
    max_seq_len: int,
    num_dummies: int,
    tiers: Mapping[str, Any],
) -> KVCacheManager:
    """The manager of the artifact's cache kind, with rows for `num_dummies` beside requests."""
    if isinstance(params, KVCacheParams) and params.cache_strategy is not KVCacheStrategy.PAGED:
        if num_pages is not None:
            raise RequestError(
                f"num_pages: expected None for a {params.cache_strategy} cache, got {num_pages}"
            )
        continuous = params.cache_strategy is KVCacheStrategy.CONTINUOUS
        kind = ContinuousBatchingKVCacheManager if continuous else PaddedKVCacheManager
        return kind(params, max_batch_size, max_seq_len, params.num_layers, params.devices, session)
    pages: int | dict[str, int] | None = num_pages
    if pages is None:
        plan = plan_leaves(params, cache_memory, max_batch_size, max_seq_len, max_batch_tokens)
        pages = plan.pages
    return PagedKVCacheManager(
        params,
        session,
        pages,
        max_batch_size=max_batch_size + num_dummies,
        max_seq_len=max_seq_len,
        **tiers,
    )


def _load_tokenizer(folder: Path) -> Any:
    path = folder / NAME
    return read_tokenizer(path, ArtifactError) if path.is_file() else None


def _decode_stream(tokenizer: Any, prompt: Sequence[int]) -> Any:
    """Incremental detokeniser behind `prompt`: gives text only once its bytes are complete.

    Some decoders strip the space before the first word of a text, which a continuation keeps, so
    it sees the prompt's last tokens first.
    """
    if tokenizer is None:
        return None
    from tokenizers.decoders import DecodeStream

    stream = DecodeStream(skip_special_tokens=True)
    for token in prompt[-SEEN_BY_DECODER:]:
        stream.step(tokenizer, token)
    return stream


def _completion(request_id: str, tokens: list[Token]) -> Completion:
    reason = tokens[-1].finish_reason
    assert reason is not None
    text = "".join(token.text for token in tokens)
    return Completion(request_id, [token.token_id for token in tokens], text, reason)
