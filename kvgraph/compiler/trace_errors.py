"""Make an error of torch.export one sentence with the line of the module that caused it."""

from __future__ import annotations

import inspect
import re
import traceback
from collections.abc import Callable, Sequence
from traceback import FrameSummary
from typing import Any
from unittest import mock

from kvgraph.compiler.model import Model
from kvgraph.compiler.sources import line, own_frame
from kvgraph.contract.signature import GraphSignature
from kvgraph.errors import KernelError, UnsupportedError
from kvgraph.signal_handlers import reraise_if_signalled

ONE_TOKEN = "it does not do for one token of one row what it does for more"

SOME_SIZES = re.compile(
    r"Not all values of (\w+) = (.+) in the specified range .* satisfy the generated guard (.+)"
)
"""torch.export's message for a dim that should be dynamic, but is not for all sizes."""

ONE_SIZE = re.compile(
    r"You marked (\w+) as dynamic but your code specialized it to be a constant \((\d+)\)"
)
"""torch's message about a dim that became a number."""


def refusal(
    model: Model, errors: Sequence[Exception], again: Callable[[], object]
) -> UnsupportedError:
    """The error to raise for a trace that failed; its cause is the first of `errors`.

    `errors`: empty: a program was traced, but is not valid for a batch of one row or token.
    `again`: traces once more, to find the line that fails.
    """
    error = errors[0] if errors else ValueError(ONE_TOKEN)
    found = own_frame(traceback.extract_tb(error.__traceback__)) or _guard_frame(again)
    refused = UnsupportedError(
        f"architecture {model.architecture!r}: torch.export cannot trace it with dynamic rows and "
        f"tokens: {_reason(error)}{_at(found)}"
    )
    refused.__cause__ = error
    return refused


def require_taken(
    forward: Callable[..., object], inputs: Sequence[object], signature: GraphSignature
) -> None:
    """Raise UnsupportedError unless `forward` takes `inputs`, those of the graph, by position."""
    taken = inspect.signature(forward, follow_wrapped=False)
    try:
        taken.bind(*inputs)
    except TypeError as error:
        names = ", ".join(symbol.name for symbol in signature.inputs)
        empty = inspect.Parameter.empty
        bare = [each.replace(annotation=empty) for each in taken.parameters.values()]
        own = taken.replace(parameters=bare, return_annotation=empty)
        raise UnsupportedError(
            f"module: expected a forward that takes {len(inputs)} inputs by position ({names}), "
            f"got one that takes {own}"
        ) from error


def call_refused(model: Model, error: KernelError) -> UnsupportedError:
    """The error to raise if a kvgraph op refuses its operands, with the module's line."""
    found = own_frame(traceback.extract_tb(error.__traceback__))
    return UnsupportedError(f"architecture {model.architecture!r}: {error}{_at(found)}")


def _at(frame: FrameSummary | None) -> str:
    return f", at {line(frame)}" if frame else ""


def _reason(error: Exception) -> str:
    """The reason in an error's message: line 1, or line 2 if constraints are violated."""
    lines = [line.strip(" -") for line in str(error).strip().splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    if lines[0].startswith("Constraints violated") and len(lines) > 1:
        lines = lines[1:]
    if found := SOME_SIZES.match(lines[0]):
        name, size, guard = found.groups()
        return f"it is made for {guard.replace(size, name).rstrip('.')}, and not for every {name}"
    if found := ONE_SIZE.match(lines[0]):
        name, size = found.groups()
        return f"it is made for {name} = {size} alone"
    return lines[0].rstrip(".")


def _guard_frame(again: Callable[[], object]) -> FrameSummary | None:
    """The frame in which the module's code depends on the size of a dynamic dim; None: not found.

    If the trace fails again, it is the first guard. Otherwise it is the first guard that is false
    for a batch of one row and token.
    """
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    seen: list[FrameSummary] = []
    record: Any = getattr(ShapeEnv, "_log_guard", None)
    if record is None:
        return None

    ruling_out: list[FrameSummary] = []

    def note(env: ShapeEnv, prefix: str, guard: Any, *args: object, **settings: object) -> None:
        record(env, prefix, guard, *args, **settings)
        frame = own_frame(traceback.extract_stack())
        if frame is None or "suppressed" in prefix:
            return
        seen.append(frame)
        if guard.subs(dict.fromkeys(guard.free_symbols, 1)) == False:  # noqa: E712, a sympy value
            ruling_out.append(frame)

    with mock.patch.object(ShapeEnv, "_log_guard", note):
        try:
            again()
        except Exception as error:  # this error is known already; only its place is needed
            reraise_if_signalled(error)
            return seen[0] if seen else None
    return ruling_out[0] if ruling_out else None
