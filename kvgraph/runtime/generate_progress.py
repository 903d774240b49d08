"""Progress of one `generate` call, in tokens: processed of the most that its requests may have."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from kvgraph.progress import is_followed, task
from kvgraph.runtime.scheduler import Request


@contextmanager
def report_progress(requests: Sequence[Request]) -> Iterator[Callable[[], None]]:
    """Open a progress task for `requests`; yield the function to call after each step.

    A request that ended early counts as whole; one that starts over counts from its start.
    """
    total = sum(request.max_length for request in requests)
    if not is_followed():
        yield _nothing
        return
    with task("processing", total, "tokens") as advance:
        reported = 0

        def update() -> None:
            nonlocal reported
            done = sum(
                request.max_length if request.finish_reason else request.context.processed_length
                for request in requests
            )
            advance(done - reported)
            reported = done

        yield update


def _nothing() -> None:
    pass
