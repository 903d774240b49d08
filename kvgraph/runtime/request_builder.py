"""Builds requests from a caller's arguments, checking types and the model's limits."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import cast

from kvgraph.contract.manifest import ModelInfo
from kvgraph.errors import RequestError
from kvgraph.kv.requests import TextContext
from kvgraph.runtime.arguments import one_for_each, sequence, token_ids
from kvgraph.runtime.edits import LogitEdits, edits_of
from kvgraph.runtime.guide import Guide, Guides
from kvgraph.runtime.logprobs import PromptScores
from kvgraph.runtime.sampling import TokenSource
from kvgraph.runtime.sampling_params import SamplingParams, require_single
from kvgraph.runtime.scheduler import Request, Scheduler
from kvgraph.runtime.stopping import StopStrings
from kvgraph.runtime.text import TextCodec


@dataclass(slots=True)
class RequestBuilder:
    """Builds requests for one model, checked to fit `scheduler`.

    RequestError names the argument or the request; nothing is changed.
    """

    model: ModelInfo
    text: TextCodec
    scheduler: Scheduler
    guides: Guides = field(init=False)

    def __post_init__(self) -> None:
        self.guides = Guides(self.model, self.text.folder, self.text.tokenizer)

    def request(
        self,
        request_id: str,
        prompt: str | Sequence[int],
        sampling: SamplingParams | None,
        cache_salt: bytes = b"",
    ) -> Request:
        """Build a request for a text or token ids. `sampling` None: the default parameters."""
        sampling = SamplingParams() if sampling is None else sampling
        require_single(sampling)
        # Empty text stays empty: the tokenizer could add a special token, which is no prompt.
        is_text = isinstance(prompt, str) and prompt != ""
        tokens = self.text.tokenize(cast(str, prompt)) if is_text else token_ids(prompt)
        self._check(request_id, tokens)
        self._check_bias(request_id, sampling.logit_bias or {})
        stops = set(sampling.stop_token_ids)
        if not sampling.ignore_eos:
            stops |= set(self.model.eos_token_ids)
        scores = self._scores(request_id, sampling.prompt_logprobs, len(tokens))
        # Prompt scores need the logits of the whole prompt, so no page may come from the cache.
        is_private = scores is not None
        context = TextContext(request_id, tokens, cache_salt=cache_salt, is_private=is_private)
        ends = [token for token in stops if token < self.model.vocab_size]
        guide: Guide | None = None
        edits = edits_of(sampling, context, ends)
        if sampling.grammar is not None:
            edits = LogitEdits(sampling, context)  # the guide knows when a request may end
            guide = self.guides.guide(sampling.grammar, sampling, context, stops, edits)
        request = Request(
            context,
            TokenSource(sampling, edits),
            frozenset(stops),
            min(len(tokens) + sampling.max_new_tokens, self.model.max_seq_len),
            self.text.stream(len(tokens), stops_of(sampling), is_guided=guide is not None),
            scores,
            guide,
        )
        self.scheduler.require_room(request)
        return request

    def requests(
        self,
        new_id: Callable[[], str],
        prompts: Sequence[str | Sequence[int]],
        sampling: SamplingParams | Sequence[SamplingParams] | None,
    ) -> list[Request]:
        """Build `n` requests for each prompt. RequestError names the index of a bad prompt."""
        listed = sequence("prompts", "text", prompts)
        requests = []
        each = one_for_each("sampling", sampling, len(listed))
        for at, (prompt, params) in enumerate(zip(listed, each, strict=True)):
            try:
                requests += self._copies(new_id, prompt, params)
            except RequestError as error:
                if len(listed) == 1:
                    raise
                raise RequestError(f"prompts[{at}]: {error}") from error
        return requests

    def _copies(
        self,
        new_id: Callable[[], str],
        prompt: str | Sequence[int],
        sampling: SamplingParams | None,
    ) -> list[Request]:
        """Build `n` requests of one prompt. Only the first asks for prompt log-probabilities."""
        if not isinstance(sampling, SamplingParams) or sampling.n == 1:
            return [self.request(new_id(), prompt, sampling)]
        first, *others = sampling.each()
        requests = [self.request(new_id(), prompt, first)]
        tokens = requests[0].context.tokens.tolist()
        for index, own in enumerate(others, 1):
            own = replace(own, prompt_logprobs=None)
            requests.append(self.request(new_id(), tokens, own))
            requests[index].index = index
        return requests

    def longest_context(self) -> int:
        """Most tokens of prompt and output that both the model and the pool allow a request."""
        kv, chunk = self.scheduler.kv, self.scheduler.max_batch_tokens
        low, high = 1, self.model.max_seq_len
        while low < high:
            middle = (low + high + 1) // 2
            try:
                kv.require_room("longest", middle - 1, chunk)
                low = middle
            except RequestError:
                high = middle - 1
        return low

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

    def _scores(self, request_id: str, most: int | None, length: int) -> PromptScores | None:
        if most is None:
            return None
        if self.scheduler.scored_tokens < 1:
            raise RequestError(
                f"request {request_id!r}: prompt_logprobs: expected None, as the graph gives "
                f"logits of one token a row, got {most}; lower max_batch_size"
            )
        return PromptScores(most, [None] * length)

    def _check_bias(self, request_id: str, biases: Mapping[int, float]) -> None:
        greatest = max(biases, default=0)
        if greatest >= self.model.vocab_size:
            raise RequestError(
                f"request {request_id!r}: logit_bias: expected token ids in "
                f"[0, {self.model.vocab_size}), got {greatest}"
            )


def stops_of(sampling: SamplingParams) -> StopStrings | None:
    """The stop strings of a request; None if it has none."""
    if not sampling.stop:
        return None
    includes, least = sampling.include_stop_str_in_output, sampling.min_new_tokens
    return StopStrings(sampling.stop, includes=includes, least=least)
