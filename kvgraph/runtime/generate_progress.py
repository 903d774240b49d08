"""Progress in tokens: of one `generate` call, and of the prompt of a stream."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from kvgraph.progress import is_followed, task
from kvgraph.runtime.scheduler import Request


@contextmanager
def report_progress(requests: Sequence[Request]) -> Iterator[Callable[[], None]]:
    """Open a progress task for `requests`; yield the function to call after each step.

    The total is the most tokens that the requests may have. A request that ended early counts as
    whole; one that starts over counts from its start.
    """
    total = sum(request.max_length for request in requests)

    def done() -> int:
        return sum(
            request.max_length if request.finish_reason else request.context.processed_length
            for request in requests
        )

    with _reported("processing", total, done) as update:
        yield update


@contextmanager
def report_prompt(request: Request) -> Iterator[Callable[[], None]]:
    """Open a progress task for the prompt of a request that has no token yet, else nothing; yield
    the function to call after each step."""
    if request.stats.first_token is not None:
        yield _nothing
        return
    length = request.prompt_length
    with _reported(
        "prompt", length, lambda: min(length, request.context.processed_length)
    ) as update:
        yield update


@contextmanager
def _reported(what: str, total: int, done: Callable[[], int]) -> Iterator[Callable[[], None]]:
    if not is_followed():
        yield _nothing
        return
    with task(what, total, "tokens") as advance:
        reported = 0

        def update() -> None:
            nonlocal reported
            now = done()
            advance(now - reported)
            reported = now

        yield update


def _nothing() -> None:
    pass
