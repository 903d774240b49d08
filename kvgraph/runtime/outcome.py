"""What a step made of its logits: a token and its text for each sampled row, or why there is none.

Nothing here changes a request: asked again after a step that failed, the answer is the same.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvgraph.runtime.sampling import Logits, rows_without_a_token, sample
from kvgraph.runtime.scheduler import Batch, FinishReason, Request
from kvgraph.runtime.text import is_panic

NO_TOKEN = -1
"""Stands for a token where a request failed before it had one."""


class Token(NamedTuple):
    """One generated token, and with the last one why its request ended.

    A request that fails on its own ends with finish_reason "error": then `error` is a sentence that
    says why, `token_id` is NO_TOKEN and `text` is empty.
    """

    request_id: str
    token_id: int
    text: str
    finish_reason: FinishReason | None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Completion:
    """A finished request: what was generated behind the prompt.

    `finish_reason` is "stop" (a stop or end token), "length" (`max_new_tokens`, or the model's
    longest context) or "error": then `error` says why, and the rest is what came before it.
    """

    request_id: str
    token_ids: list[int]
    text: str
    finish_reason: FinishReason
    error: str | None = None


class Outcome(NamedTuple):
    """A step's result before any request has it, for each sampled row of `batch`.

    `tokens`: None of a row that failed; `lengths`: of the rows before it; `said`: for the caller.
    """

    batch: Batch
    tokens: list[int | None]
    lengths: list[int]
    said: list[Token]


def outcome_of(batch: Batch, logits_RV: Logits) -> Outcome:
    """Sample and detokenise; the logits' first rows are those of `batch.sampled`."""
    rows = batch.sampled
    logits_RV = logits_RV[: len(rows)]
    drawn = sample(logits_RV, [row.source.at(row.num_generated) for row in rows])
    said = said_by(rows, drawn, rows_without_a_token(logits_RV, drawn))
    tokens = [None if token.error else token.token_id for token in said]
    return Outcome(batch, tokens, [row.context.current_length for row in rows], said)


def said_by(rows: Sequence[Request], tokens: Sequence[int], failed: Collection[int]) -> list[Token]:
    """Each row's token with the text that it completes; positions in `failed` have none."""
    said = [_said(row, token) for row, token in zip(rows, tokens, strict=True)]
    for at in failed:
        said[at] = _failure(
            rows[at], "expected a logit above -inf from the model, got NaN or -inf for every token"
        )
    return said


def completion_of(request_id: str, tokens: Sequence[Token]) -> Completion:
    """All tokens of a request that has ended."""
    last = tokens[-1]
    assert last.finish_reason is not None
    return Completion(
        request_id,
        [token.token_id for token in tokens if not token.error],
        "".join([token.text for token in tokens]),
        last.finish_reason,
        last.error,
    )


def _said(row: Request, token: int) -> Token:
    reason, text = row.reason_after(token), ""
    if reason != "stop" and row.text is not None:
        try:
            text = row.text.piece(row.context, token)
        except MemoryError:
            raise
        except BaseException as error:
            if not isinstance(error, Exception) and not is_panic(error):
                raise
            return _failure(
                row, f"expected the text of token {token} from the tokenizer, got {error}"
            )
    return Token(row.request_id, token, text, reason)


def _failure(row: Request, why: str) -> Token:
    return Token(row.request_id, NO_TOKEN, "", "error", f"request {row.request_id!r}: {why}")
