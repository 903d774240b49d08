"""What a signal handler raises reaches the caller as it is."""

from __future__ import annotations

import ast
import gc
import signal
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import kvgraph
from kvgraph.signal_handlers import ignoring, reraise_if_signalled

PACKAGE = Path(kvgraph.__file__).parent
ELSEWHERE = {
    "bench": "a process of its own",
    "serve": "tasks of an event loop",
    "kv/tiers/jobs.py": "threads of tiers",
    "kv/tiers/workers.py": "threads of tiers",
    "rebuild": "a process of its own",
    "ops/group.py": "kept, and raised once the collective is over",
    "runtime/async_engine.py": "the engine's thread, and tasks of an event loop",
    "runtime/engine_calls.py": "the engine's thread",
    "runtime/native_calls.py": "the end of Python, which no handler may cut short",
    "runtime/ranks/hosts.py": "kept, and raised in the caller's thread",
    "compiler/check/ranks.py": "threads of ranks",
}
"""Where an error of any class is kept, and why no handler's is among them or it is raised later."""

OWN_PROCESSES = {
    "bench": "a process of the command's",
    "cli": "the command, whose handlers raise KeyboardInterrupt and SystemExit",
    "__main__.py": "the command",
    "rebuild": "a process of its own",
    "serve": "the command, and processes of its replicas",
}
"""Where errors of the system are taken, and why none of a user's handler is among them."""


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


def swallowed(raising: Callable[[], object]) -> None:
    with ignoring(Exception):
        raising()


@pytest.mark.parametrize("take", [wrapped, swallowed])
def test_an_error_that_passed_keeps_nothing(
    take: Callable[..., None], handle: Callable[[Any], Any]
) -> None:
    """Such as a cursor of SQLite, which would hold a lock until the next collection."""
    handle(late)
    seen: list[weakref.ref[Limit]] = []

    def load() -> None:
        held = Limit()
        seen.append(weakref.ref(held))
        signal.raise_signal(signal.SIGUSR1)

    gc.disable()
    try:
        with suppress(OutOfTimeError):
            take(load)
        assert [each() for each in seen] == [None]
    finally:
        gc.enable()


@pytest.mark.parametrize("handler", [signal.SIG_IGN, signal.SIG_DFL, Limit()])
def test_other_errors_do_not(handle: Callable[[Any], Any], handler: Any) -> None:
    handle(handler)
    with pytest.raises(ValueError, match="a library's"):
        wrapped(lambda: 1 // 0)


def replaced(signal_in: Callable[[], object]) -> None:
    """What a library does with a time-out of its socket."""
    try:
        signal_in()
    except OutOfTimeError:
        raise ValueError("a library's own") from None


def test_a_handlers_error_that_a_library_replaced_passes(handle: Callable[[Any], Any]) -> None:
    handle(late)
    with pytest.raises(OutOfTimeError):
        wrapped(lambda: replaced(lambda: signal.raise_signal(signal.SIGUSR1)))
    with pytest.raises(OutOfTimeError), ignoring(ValueError):
        replaced(lambda: signal.raise_signal(signal.SIGUSR1))


def test_a_handlers_error_of_before_does_not(handle: Callable[[Any], Any]) -> None:
    handle(late)
    try:
        signal.raise_signal(signal.SIGUSR1)
    except OutOfTimeError:
        with pytest.raises(ValueError, match="a library's"):
            wrapped(lambda: 1 // 0)
        with ignoring(ArithmeticError):
            1 // 0  # noqa: B018


def test_ignoring(handle: Callable[[Any], Any]) -> None:
    handle(late)
    with ignoring(LookupError, OutOfTimeError):
        raise OutOfTimeError
    with pytest.raises(ZeroDivisionError), ignoring(LookupError):
        1 // 0  # noqa: B018
    with pytest.raises(OutOfTimeError), ignoring(OutOfTimeError):
        signal.raise_signal(signal.SIGUSR1)


@pytest.mark.parametrize(
    ("kinds", "elsewhere"),
    [
        ({"Exception", "BaseException"}, ELSEWHERE),
        ({"OSError", "IOError", "EnvironmentError", "TimeoutError"}, ELSEWHERE | OWN_PROCESSES),
    ],
    ids=["any", "system"],
)
def test_every_error_of_wide_classes_is_looked_at(
    kinds: set[str], elsewhere: dict[str, str]
) -> None:
    """Code that takes errors of every class, or of the system as a time limit's TimeoutError is,
    raises them again, gives them to reraise_if_signalled, or hands them to a function of ours that
    raises those it does not know. It suppresses them with `ignoring`."""
    trees = {
        path.relative_to(PACKAGE).as_posix(): ast.parse(path.read_text(encoding="utf-8"))
        for path in sorted(PACKAGE.rglob("*.py"))
    }
    named = tuples_of(trees.values())
    missing = []
    for name, tree in trees.items():
        if any(name == place or name.startswith(f"{place}/") for place in elsewhere):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.ExceptHandler):
                is_missing = bool(kinds & classes(node.type, named)) and not hands_on(node)
            else:
                is_missing = any(kinds & classes(kind, named) for kind in suppressed(node))
            if is_missing:
                missing.append(f"{name}:{node.lineno}")  # type: ignore[attr-defined]
    assert not missing


def tuples_of(trees: Iterable[ast.Module]) -> dict[str, ast.expr]:
    """Tuples with a name of their own, such as ODD."""
    lines = (line for tree in trees for line in tree.body if isinstance(line, ast.Assign))
    return {ast.unparse(t): line.value for line in lines for t in line.targets}


def classes(kind: ast.expr | None, named: dict[str, ast.expr]) -> set[str]:
    """Names of the classes that a handler takes."""
    if kind is None:
        return {"BaseException"}
    name = ast.unparse(kind)
    kind = named.get(name, kind)
    if isinstance(kind, ast.Tuple):
        return set().union(*(classes(each, named) for each in kind.elts))
    return {name.rpartition(".")[2]}


def suppressed(node: ast.AST) -> list[ast.expr]:
    """Classes of a call of `contextlib.suppress`."""
    if not isinstance(node, ast.Call):
        return []
    kinds = [each.value if isinstance(each, ast.Starred) else each for each in node.args]
    return kinds if ast.unparse(node.func).rpartition(".")[2] == "suppress" else []


def hands_on(handler: ast.ExceptHandler) -> bool:
    last = handler.body[-1]
    if isinstance(last, ast.Raise) and last.exc is None:
        return True
    calls = [node for line in handler.body for node in ast.walk(line) if isinstance(node, ast.Call)]
    names = {ast.unparse(call.func).rpartition(".")[2] for call in calls}
    return bool(names & {"reraise_if_signalled", "recover"})
