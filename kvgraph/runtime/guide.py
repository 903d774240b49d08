"""Structured output: which tokens a grammar lets a request draw next, and which it forces.

Decision: the matcher is llguidance. It takes JSON schemas, regular expressions and grammars over
any vocabulary without precomputed tables, needs no other package, and computes the masks of a batch
in native threads.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from kvgraph.contract.manifest import ModelInfo
from kvgraph.contract.plain import JsonObject
from kvgraph.contract.tokenizer import is_panic
from kvgraph.errors import MissingDependencyError, RequestError, UnsupportedError
from kvgraph.handlers import let_pass
from kvgraph.kv.requests import TextContext
from kvgraph.runtime.edits import LogitEdits
from kvgraph.runtime.grammars import Grammar
from kvgraph.runtime.machine import default_threads
from kvgraph.runtime.sampling_params import SamplingParams

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher, LLTokenizer
    from tokenizers import Tokenizer

LIMITS: JsonObject = {
    "initial_lexer_fuel": 100_000,
    "step_lexer_fuel": 50_000,
    "max_lexer_states": 20_000,
    "verbose_errors": False,
}
"""Of llguidance's parser: a first mask takes 50 ms at most, and a grammar 40 MB."""

GBNF = re.compile(r"^[^\S\n]*[\w-]+[^\S\n]*::=", re.MULTILINE)
"""A rule of it; of Lark's form, a colon is followed by no other one."""

NOT_FOLLOWED = "expected a grammar that can be followed"
"""Begins what a token's error says of its request's own grammar."""

NOT_TAKEN = "expected what llguidance takes"
"""Begins what is said of a grammar that is refused."""

MOST_COMPILED = 32
MOST_REASON = 200


class Vocabulary(NamedTuple):
    """The tokens of one engine, as llguidance has them; `words` of 32 tokens are a mask.

    `spells_ends`: an end token of the model is a word too, which llguidance takes for one.
    """

    tokenizer: LLTokenizer
    executor: LLExecutor
    words: int
    spells_ends: bool


class Guides:
    """Makes the guides of one engine: its tokenizer for llguidance once, each grammar once.

    Nothing is imported or computed before the first grammar. The MOST_COMPILED grammars that were
    used last are kept.
    """

    def __init__(self, model: ModelInfo, folder: Path, tokenizer: Tokenizer | None) -> None:
        self.vocab_size = model.vocab_size
        self._model_ends = model.eos_token_ids
        self._folder = folder
        self._tokenizer = tokenizer
        self._vocabulary: Vocabulary | None = None
        self._compiled: dict[Grammar, LLMatcher] = {}

    def guide(
        self,
        grammar: Grammar,
        params: SamplingParams,
        context: TextContext,
        stops: Collection[int],
        edits: LogitEdits,
    ) -> Guide:
        """Of a request that ends at `stops`; `edits` get its masks.

        MissingDependencyError without llguidance; RequestError for a grammar that it refuses, and
        without a tokenizer; UnsupportedError for a tokenizer that it refuses.
        """
        vocabulary = self._vocabulary or self._start(grammar.kind)
        tokenizer = vocabulary.tokenizer
        compiled = self._compiled.pop(grammar, None) or _compile(tokenizer, grammar)
        self._compiled[grammar] = compiled
        if len(self._compiled) > MOST_COMPILED:
            del self._compiled[next(iter(self._compiled))]
        ends = {stop for stop in stops if stop < self.vocab_size}
        least = context.current_length + params.min_new_tokens
        is_usual = ends == set(tokenizer.eos_tokens) and not vocabulary.spells_ends
        own = None if is_usual and not params.min_new_tokens else ends
        forceable = 0 if params.logprobs is not None else self.vocab_size
        ends_of = Ends(own, tokenizer, least)
        return Guide(compiled, vocabulary, context, edits, ends_of, forceable)

    def _start(self, field: str) -> Vocabulary:
        if self._tokenizer is None:
            raise RequestError(
                f"{field}: expected an artifact with a tokenizer, and {self._folder} has none"
            )
        try:
            from llguidance import LLExecutor, LLTokenizer
        except ImportError as error:
            raise MissingDependencyError(
                f'{field}: expected llguidance, got none; pip install "kvgraph[guide]"'
            ) from error
        known = self._tokenizer.get_vocab_size()
        size = max(self.vocab_size, known)
        # llguidance wants an end token: of a model without one the last token, which no guided
        # text then has.
        ends = [end for end in self._model_ends if end < known] or [known - 1]
        try:
            tokenizer = LLTokenizer(self._tokenizer.to_str(), n_vocab=size, eos_token=ends)
        except BaseException as error:
            let_pass(error)
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
    """Which end tokens a mask gets: those of the request where the grammar accepts, from its
    `least` length on. Where nothing else may come, the grammar decides alone.

    `own` None: llguidance has done so, with the model's end tokens.
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
    """Where the text of one request is in its grammar.

    That is a function of the context's tokens: `rewind`, and the next mask follows them again.
    Tokens below `forceable` are forced.
    """

    __slots__ = (
        "_compiled",
        "_context",
        "_edits",
        "_ends",
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
    ) -> None:
        self._compiled = compiled
        self._context = context
        self._edits = edits
        self._ends = ends
        self._forceable = forceable
        self._prompt_length = context.current_length
        self.vocabulary = vocabulary
        self.matcher: LLMatcher | None = None

    def rewind(self) -> None:
        """Go on behind the tokens that the context has, whatever was drawn."""
        self.matcher = None

    def start(self) -> LLMatcher:
        """The matcher behind the context's tokens."""
        matcher = self._compiled.deep_copy()
        matcher.consume_tokens(self._context.tokens[self._prompt_length :].tolist())
        self.matcher = matcher
        return matcher

    def set_mask(self, mask: npt.NDArray[np.uint32]) -> None:
        """Draw the next token by `mask`, which llguidance has filled; by none after an error."""
        assert self.matcher is not None
        if self.matcher.is_error():
            mask[:] = 0
        else:
            self._ends.allow(self.matcher, self._context.current_length, mask)
        self._edits.mask = mask

    def advance(self, token: int) -> tuple[list[int], bool]:
        """Tokens that must follow a drawn one, and whether nothing can follow them.

        None for a request that asks for log-probabilities: those of a forced token are not known.
        """
        assert self.matcher is not None
        self.matcher.consume_token(token)
        forced = self.matcher.compute_ff_tokens() if self._forceable else []
        if forced and max(forced) >= self._forceable:  # a token that the model does not have
            forced = []
        self.matcher.consume_tokens(forced)
        return forced, self.matcher.is_stopped() and not self.matcher.is_error()

    @property
    def error(self) -> str:
        """Why no token can be drawn, as far as the grammar knows."""
        assert self.matcher is not None
        why = self.matcher.get_error()
        return f"{NOT_FOLLOWED}, got {_reason(why)}" if why else ""


def set_masks(guides: Sequence[Guide]) -> None:
    """The masks of the next step, all together; of one engine."""
    from llguidance.numpy import fill_next_token_bitmask_par

    matchers = [guide.matcher or guide.start() for guide in guides]
    vocabulary = guides[0].vocabulary
    masks = np.empty((len(guides), vocabulary.words), np.int32)
    at = [(matcher, i) for i, matcher in enumerate(matchers)]
    fill_next_token_bitmask_par(vocabulary.executor, at, masks)
    for guide, mask in zip(guides, masks.view(np.uint32), strict=True):
        guide.set_mask(mask)


def is_taken(grammar: Grammar) -> bool:
    """Whether llguidance takes a grammar, with a tokenizer of bytes."""
    from llguidance import LLTokenizer

    try:
        _compile(LLTokenizer("byte"), grammar)
    except RequestError:
        return False
    return True


def _compile(tokenizer: LLTokenizer, grammar: Grammar) -> LLMatcher:
    """The matcher before any text. RequestError with llguidance's reason."""
    from llguidance import LLMatcher, LLParserLimits

    def refusal(why: object) -> RequestError:
        return RequestError(
            f"{grammar.kind}: {NOT_TAKEN}, got one that it refuses ({_reason(why)})"
        )

    try:
        if grammar.kind == "guided_json":
            options: Any = {"whitespace_flexible": False}
            source = LLMatcher.grammar_from_json_schema(grammar.text, overrides=options)
        elif grammar.kind == "guided_regex":
            source = LLMatcher.grammar_from_regex(grammar.text)
        else:
            source = LLMatcher.grammar_from_lark(_lark(grammar.text))
    except ValueError as error:
        raise refusal(error) from error
    matcher = LLMatcher(tokenizer, source, log_level=0, limits=LLParserLimits(**LIMITS))
    if not matcher.is_error():
        matcher.compute_bitmask()  # of what is too complex, the first mask says so
    first = matcher.deep_copy()
    if not first.is_error():
        first.consume_tokens(first.compute_ff_tokens())  # or what it forces
    for reached in (matcher, first):
        if reached.is_error():
            raise refusal(reached.get_error())
    if matcher.is_stopped():
        raise refusal("no text is possible")
    return matcher


def _lark(text: str) -> str:
    """A grammar in Lark's form. ValueError for a GBNF that has none."""
    from llguidance.gbnf_to_lark import gbnf_to_lark

    if not GBNF.search(text):
        return text
    try:
        return gbnf_to_lark(text)
    except Exception as error:  # its parser's own, and deep recursion
        let_pass(error)
        raise ValueError(f"GBNF: {error}") from error


def _reason(error: object) -> str:
    """What llguidance says, on one line."""
    return " ".join(str(error).split())[:MOST_REASON] or type(error).__name__
