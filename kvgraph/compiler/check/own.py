"""The check of a user's own module before it is lowered.

Decision: the module itself is checked, eagerly, because its tolerance is only that of its
activations. Weights and pools of fewer bits need a wider tolerance, which hides a module that
computes with the batch's size, lengths, offsets or number of logits.
"""

from __future__ import annotations

from functools import partial

from kvgraph.compiler.check.compare import difference, own_tolerance
from kvgraph.compiler.check.host import logits_of
from kvgraph.compiler.check.reference import reference_logits
from kvgraph.compiler.check.routes import routed_difference
from kvgraph.compiler.check.rows import OTHERS, chunk_of, crowd_of, rows_of
from kvgraph.compiler.interpret import ProgramRun
from kvgraph.compiler.traced import Traced
from kvgraph.contract.params import KVCacheStrategy
from kvgraph.errors import CheckError

WHERE_FEW = "where a step asks for last tokens alone", "where it asks for all tokens"
LEFT = "nothing was written, --no-check writes it all the same"


def require_own(traced: Traced) -> None:
    """Raise CheckError unless a user's own module gives a row the same logits alone, in chunks next
    to another row, in steps that ask for few logits, and in a larger batch, and its program gives
    them too.

    The proof that tokens stay apart is about tokens only: a module may also compute with the
    batch's size, lengths or offsets, and with the number of logits. Code that depends on a value
    which only larger batches have is not found.
    """
    model = traced.model
    if not model.is_own:
        return
    params, rows = traced.plan.params, rows_of(model)
    allowed = own_tolerance(traced.kinds, traced.pool_kinds)
    run = partial(logits_of, signature=traced.signature, params=params)
    apart_of = partial(routed_difference, traced, rows, allowed=allowed)
    expected = reference_logits(traced, rows)
    found = run(model.module, rows=rows, chunk=chunk_of(rows))
    apart = apart_of(found, expected)
    if not apart.fits:
        raise refusal(model.architecture, "in chunks next to another row", "alone", apart.text)
    last = run(model.module, rows=rows, chunk=chunk_of(rows), last_only=True)
    apart = difference(last, [logits[-1:] for logits in found], allowed)
    if not apart.fits:
        raise refusal(model.architecture, *WHERE_FEW, apart.text)
    if traced.plan.strategy is not KVCacheStrategy.PADDED:
        crowd, chunks = crowd_of(rows, model.max_seq_len)
        apart = apart_of(run(model.module, rows=crowd, chunk=chunks)[OTHERS:], found)
        if not apart.fits:
            raise refusal(model.architecture, *in_batches(len(rows)), apart.text)
    found = run(ProgramRun(traced.program, weights=traced.weights), rows=rows, chunk=chunk_of(rows))
    apart = apart_of(found, expected)
    if not apart.fits:
        raise CheckError(
            f"check of {model.architecture!r}: expected the logits of its own forward pass within "
            f"{allowed.error:g} of their spread, got {apart.text} in its program; {LEFT}"
        )


def in_batches(rows: int) -> tuple[str, str]:
    """The words of `refusal` for the larger batch, and for the smaller one."""
    return f"in a batch of {OTHERS + rows}", f"in one of {rows}"


def refusal(architecture: str, here: str, there: str, error: str) -> CheckError:
    """The error for rows whose logits differ `here` and `there`."""
    return CheckError(
        f"check of {architecture!r}: expected rows to have the logits {here} that they have "
        f"{there}, got others (they differ by {error} of their spread): it computes with the size, "
        f"lengths, offsets or number of logits of the batch; {LEFT}"
    )
