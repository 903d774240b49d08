"""What a step made of its logits: for each sampled row a token and its text, or why not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvgraph.runtime.sampling import Logits, sample
from kvgraph.runtime.scheduler import Batch, FinishReason, Request
from kvgraph.runtime.text import is_panic

NO_NUMBER = "expected a logit above -inf from the model, got NaN or -inf for every token"

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
    reasons: list[FinishReason | None]
    lengths: list[int]
    said: list[Token]


def outcome_of(batch: Batch, logits_RV: Logits) -> Outcome:
    """Sample and detokenise; the logits' first rows are those of `batch.sampled`.

    Each row's source and text have gone on by a token: `rewind_output` undoes that.
    """
    rows = batch.sampled
    tokens = sample(logits_RV[: len(rows)], [row.source for row in rows])
    said = said_by(rows, tokens)
    reasons = [token.finish_reason for token in said]
    if "error" in reasons:
        tokens = [None if token.error else token.token_id for token in said]
    return Outcome(batch, tokens, reasons, [row.context.current_length for row in rows], said)


def said_by(rows: Sequence[Request], tokens: Sequence[int | None]) -> list[Token]:
    """Each row's token with the text that it completes."""
    said = []
    for row, token in zip(rows, tokens, strict=True):
        if token is None:
            said.append(_failure(row, NO_NUMBER))
            continue
        reason, text = row.reason_after(token), ""
        if reason != "stop" and row.text is not None:
            try:
                text = row.text.piece(row.context, token)
            except MemoryError:
                raise
            except BaseException as error:
                if not isinstance(error, Exception) and not is_panic(error):
                    raise
                why = f"expected the text of token {token} from the tokenizer, got {error}"
                said.append(_failure(row, why))
                continue
        said.append(Token(row.request_id, token, text, reason))
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


def _failure(row: Request, why: str) -> Token:
    return Token(row.request_id, NO_TOKEN, "", "error", f"request {row.request_id!r}: {why}")
