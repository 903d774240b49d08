"""Why torch.export refused a module, in one sentence with the module's own line."""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable, Sequence
from traceback import FrameSummary
from typing import Any
from unittest import mock

from kvgraph.compiler.model import Model
from kvgraph.compiler.sources import line, own_frame
from kvgraph.errors import KernelError, UnsupportedError
from kvgraph.handlers import let_pass

ONE_TOKEN = "it does not do for one token of one row what it does for more"

SOME_SIZES = re.compile(
    r"Not all values of (\w+) = (.+) in the specified range .* satisfy the generated guard (.+)"
)
"""torch.export's sentence about a dim that is to be dynamic."""


def refusal(
    model: Model, errors: Sequence[Exception], again: Callable[[], object]
) -> UnsupportedError:
    """What to raise for a trace that failed with `errors`, of which the first says most.

    None: the program that came is not for a batch of one row or token. `again` traces once more, to
    see where it fails.
    """
    error = errors[0] if errors else ValueError(ONE_TOKEN)
    found = own_frame(traceback.extract_tb(error.__traceback__)) or _guard_frame(again)
    refused = UnsupportedError(
        f"architecture {model.architecture!r}: torch.export cannot trace it with dynamic rows and "
        f"tokens: {_reason(error)}{_at(found)}"
    )
    refused.__cause__ = error
    return refused


def call_refused(model: Model, error: KernelError) -> UnsupportedError:
    """What to raise where one of our ops refuses its operands: the module's own line calls it."""
    found = own_frame(traceback.extract_tb(error.__traceback__))
    return UnsupportedError(f"architecture {model.architecture!r}: {error}{_at(found)}")


def _at(frame: FrameSummary | None) -> str:
    return f", at {line(frame)}" if frame else ""


def _reason(error: Exception) -> str:
    """The first line, and what a violated constraint is about: it stands in the second."""
    lines = [line.strip(" -") for line in str(error).strip().splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    if lines[0].startswith("Constraints violated") and len(lines) > 1:
        lines = lines[1:]
    if found := SOME_SIZES.match(lines[0]):
        name, size, guard = found.groups()
        return f"it is made for {guard.replace(size, name).rstrip('.')}, and not for every {name}"
    return lines[0].rstrip(".")


def _guard_frame(again: Callable[[], object]) -> FrameSummary | None:
    """Where the module asks how large a dynamic dim is: a constraint fails after the trace. Where
    none fails, the question whose answer is another one for a batch of one row and token."""
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
        except Exception as error:  # known already: only its place was missing
            let_pass(error)
            return seen[0] if seen else None
    return ruling_out[0] if ruling_out else None
