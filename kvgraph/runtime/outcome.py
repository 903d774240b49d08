"""Turns a step's logits into tokens, their text and log-probabilities; changes no request yet.

Tokens are drawn by the kernel `kvgraph.ops.native.sample`.

Decision: a kernel, not NumPy. Times for 64 rows of 32,000 logits like a trained model's, in steps
of at most 40 ms: 205 ms if every row is sorted; 2 to 5 ms if only each row's likeliest tokens are;
1.1 to 1.6 ms if a kernel finds these; all in the kernel, 0.22 ms (top-k) to 0.39 ms (top-p,
temperature), and 0.15 ms greedy. NumPy takes a single greedy row: a kernel call is 50 us slower
there, 1 % of a step of 5 ms, because a step evicts the kernel's code and data from the CPU caches.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from kvgraph.contract.tokenizer import is_panic
from kvgraph.ops import native
from kvgraph.runtime.guide import Guide, set_masks
from kvgraph.runtime.logprobs import score
from kvgraph.runtime.sampling import NO_TOKEN, FinishReason, Logits, Token, TokenSource
from kvgraph.runtime.scheduler import Batch, Request
from kvgraph.signal_handlers import reraise_if_signalled

NO_NUMBER = "expected a logit above -inf from the model, got NaN or -inf for every token"
NOT_ALLOWED = "expected a logit above -inf of a token that may come, got NaN or -inf for every one"

NOTHING_FORCED: Mapping[str, Sequence[int]] = {}


class Outcome(NamedTuple):
    """The result of a step before it is given to requests, for each sampled row of `batch`.

    `tokens`: None for a row that failed. `lengths`: of the rows' contexts before the step.
    `generated`: tokens for the callers. `forced`: by request id, tokens that its grammar forces
    after its drawn token.
    """

    batch: Batch
    tokens: list[int | None]
    reasons: list[FinishReason | None]
    lengths: list[int]
    generated: list[Token]
    forced: Mapping[str, Sequence[int]] = NOTHING_FORCED


def outcome_of(batch: Batch, logits_RV: Logits) -> Outcome:
    """Sample tokens and decode their text. The first rows of the logits belong to `batch.sampled`,
    the next ones to `batch.scored`.

    This advances each row's random source and text by a token: `rewind_output` undoes that.
    """
    rows = batch.sampled
    if guides := [row.guide for row in rows if row.guide is not None]:
        set_masks(guides)
    tokens = sample(logits_RV[: len(rows)], [row.source for row in rows])
    generated, ahead = tokens_with_text(rows, tokens)
    if batch.scored:
        score_prompts(batch, logits_RV)
    if any(row.source.asks for row in rows):
        generated = tokens_with_logprobs(rows, generated, logits_RV)
    reasons = [token.finish_reason for token in generated]
    if "error" in reasons:
        tokens = [None if token.error else token.token_id for token in generated]
    lengths = [row.context.current_length for row in rows]
    outcome = Outcome(batch, tokens, reasons, lengths, generated)
    return with_forced(outcome, ahead) if ahead else outcome


def sample(logits_RV: Logits, sources: Sequence[TokenSource]) -> list[int | None]:
    """Draw one token for each row of `logits [rows, vocab]`. The logits are not changed, and not
    copied if they are contiguous float32.

    A sampled row's token is the inverse transform of one random number over the tokens that min-p,
    top-k and top-p keep, in order of probability, then of id. A NaN counts as -Inf. None for a row
    if all its logits, after edits, are -Inf.
    """
    if len(sources) == 1 and sources[0].params.temperature == 0 and not sources[0].edits:
        token = int(logits_RV[0].argmax())
        if logits_RV[0, token] > -math.inf:  # false if argmax found NaN, or all are -Inf
            return [token]
    vocab = logits_RV.shape[1]
    draws = []
    for source in sources:
        p, edits = source.params, source.edits
        address = edits.address() if edits else 0
        number = source.uniform() if p.temperature > 0 else 0.0
        draws.append((p.temperature, p.top_p, number, min(p.top_k, vocab), p.min_p, address))
    tokens = native.sample(np.ascontiguousarray(logits_RV, np.float32), draws)[0]
    return [token if token >= 0 else None for token in tokens]


def tokens_with_text(
    rows: Sequence[Request], tokens: Sequence[int | None]
) -> tuple[list[Token], dict[str, list[Token]]]:
    """Each row's token with its text, and by request id the tokens that it forces."""
    generated, ahead = list[Token](), dict[str, list[Token]]()
    for row, token in zip(rows, tokens, strict=True):
        if token is None:
            generated.append(_failure(row, _no_token(row), _held_text(row)))
        elif row.guide is None:
            generated.append(_with_text(row, token))
        else:
            first, *rest = _drawn_and_forced(row, row.guide, token)
            generated.append(first)
            if rest:
                ahead[row.request_id] = rest
    return generated, ahead


def _drawn_and_forced(row: Request, guide: Guide, token: int) -> list[Token]:
    """A drawn token and the tokens that it forces, up to one that ends the request."""
    if row.reason_after(token) == "stop":
        return [_with_text(row, token)]
    try:
        forced, is_complete = guide.advance(token)
    except BaseException as error:
        reraise_if_signalled(error)
        if not is_panic(error):
            raise
        return [_failure(row, guide.fail(error), _held_text(row))]
    told: list[Token] = []
    for behind, each in enumerate([token, *forced]):
        told.append(_with_text(row, each, behind, is_last=is_complete and behind == len(forced)))
        if told[-1].finish_reason:
            break
    return told


def _with_text(row: Request, token: int, behind: int = 0, *, is_last: bool = False) -> Token:
    """A token with the text that it completes. `behind`: number of tokens of this step before it.

    `is_last`: no token can follow, so the request ends; the token's text still counts.
    """
    reason, stream, text, held = row.reason_after(token, behind), row.text, "", ""
    is_text = reason != "stop"
    if is_last:
        reason = "stop"
    stop: str | int | None = None
    characters: int | None = None
    if stream is not None and (is_text or stream.stops is not None):
        try:
            if not stream.is_begun:
                stream.start(row.context)
            if stream.stops is not None:
                held = stream.stops.held
            if is_text:
                text = stream.step(token)
            if stream.stops is not None:
                characters = len(text)
                count = row.context.current_length + behind + 1 - row.prompt_length
                text, stop = stream.stops.step(text, count, ends=reason is not None)
        except MemoryError:
            raise
        except BaseException as error:
            reraise_if_signalled(error)
            if not isinstance(error, Exception) and not is_panic(error):
                raise
            why = f"expected the text of token {token} from the tokenizer, got {error}"
            return _failure(row, why, held)
    if stop is None and not is_text and token in row.source.params.stop_token_ids:
        stop = token
    elif stop is not None:
        reason = "stop"
    return Token(row.request_id, token, text, reason, stop_reason=stop, characters=characters)


def with_forced(outcome: Outcome, ahead: Mapping[str, Sequence[Token]]) -> Outcome:
    """Add the forced tokens `ahead` to the outcome. They have no logits.

    Random numbers are skipped for them, as if they had been drawn.
    """
    batch, tokens, reasons, lengths, generated, _ = outcome
    tokens, every = list(tokens), list[Token]()
    for at, (row, token) in enumerate(zip(batch.sampled, generated, strict=True)):
        rest = ahead.get(row.request_id, ())
        every += [token, *rest]
        if rest:
            row.source.rewind(lengths[at] + 1 + len(rest) - row.prompt_length)
            reasons[at] = rest[-1].finish_reason
            if rest[-1].error:
                tokens[at] = None
    forced = {name: [token.token_id for token in rest] for name, rest in ahead.items()}
    return Outcome(batch, tokens, reasons, lengths, every, forced)


def score_prompts(batch: Batch, logits_RV: Logits) -> None:
    """Store the prompts' log-probabilities from this step's logits in their requests."""
    row = len(batch.sampled)
    for request, span in batch.scored:
        scores, tokens = request.scores, request.context.tokens
        assert scores is not None
        asked = [(row + i, int(tokens[at + 1]), scores.most) for i, at in enumerate(span)]
        scores.found[span.start + 1 : span.stop + 1] = score(logits_RV, asked)
        scores.known = span.stop
        row += len(span)


def tokens_with_logprobs(
    rows: Sequence[Request], generated: Sequence[Token], logits_RV: Logits
) -> list[Token]:
    """Add the requested log-probabilities to the tokens, and the prompt's to the first one."""
    told = list(generated)
    at = [
        i
        for i, (row, token) in enumerate(zip(rows, generated, strict=True))
        if row.source.params.logprobs is not None and not token.error
    ]
    asked = [(i, told[i].token_id, rows[i].source.params.logprobs or 0) for i in at]
    for i, found in zip(at, score(logits_RV, asked), strict=True):
        told[i] = told[i]._replace(logprobs=found)
    for i, row in enumerate(rows):
        if row.scores is not None and row.context.current_length == row.prompt_length:
            told[i] = told[i]._replace(prompt_logprobs=row.scores.found)
    return told


def _no_token(row: Request) -> str:
    if row.guide is not None and (why := row.guide.error):
        return why
    return NO_NUMBER if row.source.edits is None else NOT_ALLOWED


def _held_text(row: Request) -> str:
    """Text that the row's stop strings hold back; empty if it cannot be decoded."""
    stream = row.text
    if stream is None or stream.stops is None:
        return ""
    if not stream.is_begun:
        try:
            stream.start(row.context)
        except Exception as error:
            reraise_if_signalled(error)
            return ""
    return stream.stops.held


def _failure(row: Request, why: str, held: str) -> Token:
    return Token(row.request_id, NO_TOKEN, held, "error", f"request {row.request_id!r}: {why}")
