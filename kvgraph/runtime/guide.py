"""Structured output: the tokens that a grammar allows a request next, and those that it forces.

Decision: the matcher is llguidance. It takes JSON schemas, regular expressions and grammars over
any vocabulary without precomputed tables, needs no other package, and computes the masks of a batch
in native threads.
"""

from __future__ import annotations

import threading
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt

from kvgraph.contract.loading import importing
from kvgraph.contract.manifest import ModelInfo
from kvgraph.contract.plain import JsonObject
from kvgraph.contract.tokenizer import is_panic
from kvgraph.errors import RequestError, UnsupportedError
from kvgraph.kv.requests import TextContext
from kvgraph.runtime.edits import LogitEdits
from kvgraph.runtime.forced_text import forced_text
from kvgraph.runtime.gbnf import as_lark
from kvgraph.runtime.grammars import Grammar
from kvgraph.runtime.machine import default_threads
from kvgraph.runtime.native_calls import native_call
from kvgraph.runtime.quoting import as_quoted
from kvgraph.runtime.sampling_params import SamplingParams
from kvgraph.signal_handlers import reraise_if_signalled

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher, LLTokenizer, TokenizerWrapper
    from tokenizers import Tokenizer

LIMITS: JsonObject = {
    "initial_lexer_fuel": 100_000,
    "step_lexer_fuel": 50_000,
    "max_lexer_states": 20_000,
    "verbose_errors": False,
}
"""Limits of llguidance's parser: a first mask takes at most 50 ms, and a grammar 40 MB."""

NOT_FOLLOWED = "expected a grammar that can be followed"
"""Start of a token's error message about its request's grammar."""

NOT_TAKEN = "expected what llguidance takes"
"""Start of the error message about a grammar that llguidance rejects."""

NO_TEXT = "no text is possible"

COERCES = ". Enable 'coerce_one_of' option to approximate oneOf with anyOf"
"""llguidance's advice about a `oneOf`, which a user cannot follow."""

MOST_COMPILED = 32
MOST_REASON = 200


class Vocabulary(NamedTuple):
    """An engine's tokens in llguidance. `words`: 32-bit words of a mask.

    `spells_ends`: an end token of the model also has text, so llguidance may allow it as text.
    """

    tokenizer: LLTokenizer
    executor: LLExecutor
    words: int
    spells_ends: bool


class Guides:
    """Makes the guides of one engine, and caches its llguidance tokenizer and compiled grammars.

    Nothing is imported or computed before the first grammar. The cache keeps the MOST_COMPILED
    grammars that were used last.
    """

    def __init__(self, model: ModelInfo, folder: Path, tokenizer: Tokenizer | None) -> None:
        self.vocab_size = model.vocab_size
        self._model_ends = model.eos_token_ids
        self._folder = folder
        self._tokenizer = tokenizer
        self._vocabulary: Vocabulary | None = None
        self._compiled: dict[Grammar, LLMatcher] = {}
        self._changes = threading.Lock()  # an AsyncEngine's grammar thread and its own come here

    @native_call("guide")
    def guide(
        self,
        grammar: Grammar,
        params: SamplingParams,
        context: TextContext,
        stops: Collection[int],
        edits: LogitEdits,
    ) -> Guide:
        """Make the guide of a request that ends at `stops`; it sets the masks of `edits`.

        MissingDependencyError without llguidance. RequestError for a grammar that llguidance
        rejects, and without a tokenizer. UnsupportedError for a tokenizer that it rejects.
        """
        vocabulary = self._vocabulary or self._start(grammar.kind)
        tokenizer = vocabulary.tokenizer
        compiled = self._compiled.get(grammar) or _compile(tokenizer, grammar)
        with self._changes:
            self._compiled.pop(grammar, None)
            self._compiled[grammar] = compiled  # the last of them
            if len(self._compiled) > MOST_COMPILED:
                del self._compiled[next(iter(self._compiled))]
        ends = {stop for stop in stops if stop < self.vocab_size}
        least = context.current_length + params.min_new_tokens
        is_usual = ends == set(tokenizer.eos_tokens) and not vocabulary.spells_ends
        own = None if is_usual and not params.min_new_tokens else ends
        ends_of = Ends(own, tokenizer, least)
        draws_all = params.logprobs is not None
        return Guide(compiled, vocabulary, context, edits, ends_of, self.vocab_size, draws_all)

    def _start(self, field: str) -> Vocabulary:
        if self._tokenizer is None:
            raise RequestError(
                f"{field}: expected an artifact with a tokenizer, and {self._folder} has none"
            )
        with importing("llguidance", f"needed for {field}", "pip install 'kvgraph[guide]'"):
            from llguidance import LLExecutor, LLTokenizer

        known = self._tokenizer.get_vocab_size()
        size = max(self.vocab_size, known)
        # llguidance requires an end token. For a model without one, use the last token, which then
        # never occurs in guided text.
        ends = [end for end in self._model_ends if end < known] or [known - 1]
        try:
            own = LLTokenizer(self._tokenizer.to_str(), n_vocab=size, eos_token=ends)
            forced = cast("TokenizerWrapper", forced_text(self._tokenizer, own))
            tokenizer = LLTokenizer(forced, eos_token=ends)
        except BaseException as error:
            reraise_if_signalled(error)
            if not isinstance(error, Exception) and not is_panic(error):
                raise
            raise UnsupportedError(
                f"{field}: expected a tokenizer that llguidance takes, got that of {self._folder} "
                f"({_reason(error)})"
            ) from error
        added = self._tokenizer.get_added_tokens_decoder()
        spells_ends = any(end not in added or not added[end].special for end in ends)
        executor = LLExecutor(default_threads())
        self._vocabulary = Vocabulary(tokenizer, executor, (size + 31) // 32, spells_ends)
        return self._vocabulary


class Ends:
    """Sets a mask's end tokens: the request's, where the grammar accepts the text, from the
    `least_length` on. If no other token is allowed, the mask stays as the grammar gave it.

    `own`: the request's end tokens. None: llguidance has set the model's end tokens already.
    """

    __slots__ = ("_least_length", "_own", "_tokens")

    def __init__(self, own: set[int] | None, tokenizer: LLTokenizer, least_length: int) -> None:
        self._own = own
        self._tokens = (own or set()) | set(tokenizer.eos_tokens)
        self._least_length = least_length

    def allow(self, matcher: LLMatcher, length: int, mask: npt.NDArray[np.uint32]) -> None:
        if self._own is None:
            return
        kept = mask.copy()
        is_end = matcher.is_accepting() and length >= self._least_length
        for token in self._tokens:
            word, bit = mask[token >> 5], np.uint32(1 << (token & 31))
            mask[token >> 5] = word | bit if is_end and token in self._own else word & ~bit
        if not mask.any():
            mask[:] = kept


class Guide:
    """The position of one request's text in its grammar.

    It is a function of the context's tokens: after `rewind`, the next mask consumes them again.
    `forceable`: only token ids below it are forced. `draws_all`: tokens that must follow are drawn
    one by one, since each needs its logits.
    """

    __slots__ = (
        "_compiled",
        "_context",
        "_draws_all",
        "_due",
        "_edits",
        "_ends",
        "_failure",
        "_forceable",
        "_prompt_length",
        "matcher",
        "vocabulary",
    )

    def __init__(
        self,
        compiled: LLMatcher,
        vocabulary: Vocabulary,
        context: TextContext,
        edits: LogitEdits,
        ends: Ends,
        forceable: int,
        draws_all: bool,
    ) -> None:
        self._compiled = compiled
        self._context = context
        self._edits = edits
        self._ends = ends
        self._forceable = forceable
        self._draws_all = draws_all
        self._due: tuple[int, list[int]] = 0, []
        self._failure = ""
        self._prompt_length = context.current_length
        self.vocabulary = vocabulary
        self.matcher: LLMatcher | None = None

    def rewind(self) -> None:
        """Discard the matcher; the next mask starts after the tokens that the context has then."""
        self.matcher, self._failure = None, ""

    def fail(self, error: BaseException) -> str:
        """Allow no token, because llguidance panicked; the reason, for the user."""
        self._failure = f"{NOT_FOLLOWED}, got one at which llguidance panicked ({_reason(error)})"
        self._edits.mask = np.zeros(self.vocabulary.words, np.uint32)
        return self._failure

    def start(self) -> LLMatcher:
        """Make a matcher that has consumed the context's generated tokens."""
        matcher = self._compiled.deep_copy()
        matcher.consume_tokens(self._context.tokens[self._prompt_length :].tolist())
        self.matcher = matcher
        return matcher

    def set_mask(self, mask: npt.NDArray[np.uint32]) -> None:
        """Use the filled `mask` for the next token; allow no token after an error."""
        assert self.matcher is not None
        if self.matcher.is_error():
            mask[:] = 0
        else:
            self._ends.allow(self.matcher, self._context.current_length, mask)
            if (due := self._due_token()) is not None:
                mask[:] = 0
                mask[due >> 5] = 1 << (due & 31)
        self._edits.mask = mask

    def _due_token(self) -> int | None:
        """The token that must come next, in a request that draws all; None if several may.

        None too if the token before them was drawn in a step that failed: it is drawn again.
        """
        start, due = self._due
        if not due or self._context.current_length < start:
            return None
        drawn = self._context.tokens[start:].tolist()
        return due[len(drawn)] if len(drawn) < len(due) and due[: len(drawn)] == drawn else None

    def advance(self, token: int) -> tuple[list[int], bool]:
        """Consume a drawn token. Return tokens to append behind it, and whether the text ends."""
        assert self.matcher is not None
        self.matcher.consume_token(token)
        is_due = self._due_token() is not None  # the others that must follow are known
        forced = [] if is_due else self.matcher.compute_ff_tokens()
        if forced and max(forced) >= self._forceable:  # a token that the model does not have
            forced = []
        if self._draws_all and not is_due:
            self._due, forced = (self._context.current_length + 1, forced), []
        self.matcher.consume_tokens(forced)
        return forced, self.matcher.is_stopped() and not self.matcher.is_error()

    @property
    def error(self) -> str:
        """The matcher's error, for the user; empty if there is none."""
        if self._failure:
            return self._failure
        assert self.matcher is not None
        why = self.matcher.get_error()
        return f"{NOT_FOLLOWED}, got one that cannot ({_reason(why)})" if why else ""


@native_call("masks")
def set_masks(guides: Sequence[Guide]) -> None:
    """Set the masks of the next step of `guides`, which belong to one engine, in parallel.

    A guide at which llguidance panics allows no token; the others go on.
    """
    try:
        _fill_masks(guides)
    except BaseException as error:
        reraise_if_signalled(error)
        if not is_panic(error):
            raise
        for guide in guides:  # one by one, to find it
            try:
                _fill_masks([guide])
            except BaseException as own:
                reraise_if_signalled(own)
                if not is_panic(own):
                    raise
                guide.fail(own)


def _fill_masks(guides: Sequence[Guide]) -> None:
    from llguidance.numpy import fill_next_token_bitmask_par

    matchers = [guide.matcher or guide.start() for guide in guides]
    vocabulary = guides[0].vocabulary
    masks = np.empty((len(guides), vocabulary.words), np.int32)
    at = [(matcher, i) for i, matcher in enumerate(matchers)]
    fill_next_token_bitmask_par(vocabulary.executor, at, masks)
    for guide, mask in zip(guides, masks.view(np.uint32), strict=True):
        guide.set_mask(mask)


def refusal_of(grammar: Grammar) -> RequestError | None:
    """llguidance's refusal of a grammar, with a tokenizer of bytes; None if it takes it."""
    from llguidance import LLTokenizer

    try:
        _compile(LLTokenizer("byte"), grammar)
    except RequestError as error:
        return error
    return None


@native_call("grammar")
def _compile(tokenizer: LLTokenizer, grammar: Grammar) -> LLMatcher:
    """The matcher before any text. RequestError with llguidance's reason."""
    try:
        return _matcher(tokenizer, grammar)
    except BaseException as error:
        reraise_if_signalled(error)
        if not isinstance(error, ValueError) and not is_panic(error):
            raise
        raise RequestError(
            f"{grammar.kind}: {NOT_TAKEN}, got one that it refuses ({_reason(error)})"
        ) from error


def _matcher(tokenizer: LLTokenizer, grammar: Grammar) -> LLMatcher:
    """Compile a grammar. ValueError with llguidance's reason."""
    from llguidance import LLMatcher, LLParserLimits

    if grammar.kind == "guided_json":
        text, options = as_quoted(grammar.text)
        source = LLMatcher.grammar_from_json_schema(text, overrides=cast(Any, options))
    elif grammar.kind == "guided_regex":
        source = LLMatcher.grammar_from_regex(grammar.text)
    else:
        source = LLMatcher.grammar_from_lark(as_lark(grammar.text))
    matcher = LLMatcher(tokenizer, source, log_level=0, limits=LLParserLimits(**LIMITS))
    if not matcher.is_error():
        matcher.compute_bitmask()  # reports a grammar that is too complex
    first = matcher.deep_copy()
    if not first.is_error():
        first.consume_tokens(first.compute_ff_tokens())  # or its forced start reports it
    for reached in (matcher, first):
        if reached.is_error():
            raise ValueError(reached.get_error())
    if matcher.is_stopped():
        raise ValueError(NO_TEXT)
    return matcher


def _reason(error: object) -> str:
    """An error of llguidance on one line, at most MOST_REASON characters."""
    text = " ".join(str(error).split()).replace(COERCES, "; use anyOf")
    if text.startswith("NoExtensionBias"):
        return NO_TEXT
    return text[:MOST_REASON] or type(error).__name__
