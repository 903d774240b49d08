"""What a signal handler raises reaches the caller as it is."""

from __future__ import annotations

import ast
import signal
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import kvgraph
from kvgraph.signal_handlers import reraise_if_signalled

PACKAGE = Path(kvgraph.__file__).parent
ELSEWHERE = {
    "bench": "a process of its own",
    "serve": "tasks of an event loop",
    "kv": "threads of tiers",
    "rebuild": "a process of its own",
    "ops/group.py": "kept, and raised once the collective is over",
    "runtime/async_engine.py": "the engine's thread, and tasks of an event loop",
    "runtime/engine_calls.py": "the engine's thread",
    "runtime/native_calls.py": "the end of Python, which no handler may cut short",
    "runtime/ranks": "kept, and raised in the caller's thread",
    "compiler/check/ranks.py": "threads of ranks",
}
"""Where an error of any class is kept, and why no handler's is among them or it is raised later."""


class OutOfTimeError(Exception):
    pass


def late(*_: Any) -> None:
    raise OutOfTimeError


class Limit:
    def __call__(self, *_: Any) -> None:
        late()

    def reached(self, *_: Any) -> None:
        raise OutOfTimeError


def searching(_: int, frame: Any) -> None:
    while frame is not None:
        frame = frame.f_back
    raise OutOfTimeError


def once(number: int, _: Any) -> None:
    """It is no handler any more when its error arrives."""
    signal.signal(number, signal.SIG_DFL)
    raise OutOfTimeError


@pytest.fixture
def handle() -> Iterator[Callable[[Any], Any]]:
    before = signal.getsignal(signal.SIGUSR1)
    yield partial(signal.signal, signal.SIGUSR1)
    signal.signal(signal.SIGUSR1, before)


def wrapped(raising: Callable[[], object]) -> None:
    try:
        raising()
    except Exception as error:
        reraise_if_signalled(error)
        raise ValueError("a library's") from error


@pytest.mark.parametrize(
    "handler", [late, once, searching, Limit(), Limit().reached, partial(late, 1)]
)
def test_a_handlers_error_passes(handle: Callable[[Any], Any], handler: Any) -> None:
    handle(handler)
    with pytest.raises(OutOfTimeError):
        wrapped(lambda: signal.raise_signal(signal.SIGUSR1))


@pytest.mark.parametrize("handler", [signal.SIG_IGN, signal.SIG_DFL, Limit()])
def test_other_errors_do_not(handle: Callable[[Any], Any], handler: Any) -> None:
    handle(handler)
    with pytest.raises(ValueError, match="a library's"):
        wrapped(lambda: 1 // 0)


def test_every_error_of_any_class_is_looked_at() -> None:
    """Code that takes errors of every class raises them again, gives them to reraise_if_signalled,
    or hands them to a function of ours that raises those it does not know."""
    missing = []
    for path in sorted(PACKAGE.rglob("*.py")):
        name = path.relative_to(PACKAGE).as_posix()
        if any(name == place or name.startswith(f"{place}/") for place in ELSEWHERE):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ExceptHandler) and takes_all(node) and not hands_on(node):
                missing.append(f"{name}:{node.lineno}")
    assert not missing


def takes_all(handler: ast.ExceptHandler) -> bool:
    kinds = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    return any(
        kind is None or (isinstance(kind, ast.Name) and kind.id in {"Exception", "BaseException"})
        for kind in kinds
    )


def hands_on(handler: ast.ExceptHandler) -> bool:
    last = handler.body[-1]
    if isinstance(last, ast.Raise) and last.exc is None:
        return True
    calls = [node for line in handler.body for node in ast.walk(line) if isinstance(node, ast.Call)]
    names = {ast.unparse(call.func).rpartition(".")[2] for call in calls}
    return bool(names & {"reraise_if_signalled", "recover"})
