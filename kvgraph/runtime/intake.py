"""From what a caller passes to a request: types, text, and the model's limits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

from kvgraph.contract.manifest import ModelInfo
from kvgraph.contract.tokenizer import NAME, encode
from kvgraph.errors import ArtifactError, RequestError
from kvgraph.kv.requests import TextContext
from kvgraph.runtime.arguments import instance, token_ids
from kvgraph.runtime.sampling import SamplingParams, TokenSource
from kvgraph.runtime.scheduler import Request
from kvgraph.runtime.text import TextStream

if TYPE_CHECKING:
    from tokenizers import Tokenizer


@dataclass(slots=True)
class Intake:
    """Makes the requests of one model. `tokenizer` is None where the artifact in `folder` has none.

    All errors are RequestErrors that name the argument or the request; nothing is changed.
    """

    model: ModelInfo
    tokenizer: Tokenizer | None
    folder: Path

    def request(
        self,
        request_id: str,
        prompt: str | Sequence[int],
        sampling: SamplingParams | None,
        cache_salt: bytes,
    ) -> Request:
        """A request of text or token ids; None samples as the defaults do."""
        sampling = SamplingParams() if sampling is None else sampling
        instance("sampling", sampling, SamplingParams, "SamplingParams")
        # An empty text is empty even where the tokenizer puts a token of its own in front.
        is_text = isinstance(prompt, str) and prompt != ""
        tokens = self.tokenize(cast(str, prompt)) if is_text else token_ids(prompt)
        self._check(request_id, tokens)
        stops = set(sampling.stop_token_ids)
        if not sampling.ignore_eos:
            stops |= set(self.model.eos_token_ids)
        return Request(
            TextContext(request_id, tokens, cache_salt=cache_salt),
            TokenSource(sampling),
            frozenset(stops),
            min(len(tokens) + sampling.max_new_tokens, self.model.max_seq_len),
            TextStream(self.tokenizer, len(tokens)) if self.tokenizer is not None else None,
        )

    def tokenize(self, text: str, *, special_tokens: bool = True) -> list[int]:
        """ArtifactError without a tokenizer."""
        instance("prompt", text, str, "text")
        if self.tokenizer is None:
            raise ArtifactError(
                f"{self.folder}: expected tokenizer.json for a text prompt, got none; "
                "pass token ids"
            )
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RequestError(f"prompt: expected text in Unicode, got {error}") from error
        path = self.folder / NAME
        return encode(self.tokenizer, text, path, ArtifactError, special_tokens=special_tokens)

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
