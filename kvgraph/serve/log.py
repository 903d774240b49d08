"""Logs lines of JSON on stderr: one for each request, and others for events."""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from kvgraph.progress import Advance
from kvgraph.serve.answers import encoded
from kvgraph.serve.generation import Generation
from kvgraph.serve.jobs import Job
from kvgraph.serve.stderr import write_text


def log_request(
    path: str, status: int, job: Job, generation: Generation, started: float, prompts: bool
) -> None:
    """Log a generation. Times are in seconds; texts of prompts are included only if `prompts`."""
    first = generation.choices[0].stream.stats if generation.choices else None
    line: dict[str, object] = {
        "time": round(time.time(), 3),
        "request": job.id,
        "path": path,
        "status": status,
        "prompt_tokens": sum(map(len, job.prompts)),
        "cached_tokens": generation.cached_tokens,
        "generated_tokens": generation.generated_tokens,
        "reasons": [choice.finish_reason or "abort" for choice in generation.choices],
        "queue_seconds": first and first.queue_seconds,
        "first_token_seconds": first and first.first_token_seconds,
        "seconds": round(time.perf_counter() - started, 6),
    }
    if prompts:
        line["prompts"] = job.texts
    write_line(line)


def log_answer(path: str | None, status: int, request_id: str = "") -> None:
    """Log a request that generates nothing, or was refused early; the answer has the reason.

    `path`: None if the head was refused.
    """
    line: dict[str, object] = {"time": round(time.time(), 3)}
    if is_request_id(request_id):
        line["request"] = request_id
    write_line(line | {"path": path, "status": status})


REQUEST_ID = "x-request-id"
"""Header with the request's id, in request and answer: the client's, or one that is made here."""


def is_request_id(text: str) -> bool:
    """Whether a client's request id is accepted unchanged."""
    return bool(VISIBLE.fullmatch(text))


VISIBLE = re.compile("[!-~]{1,128}")


class LinesOfOthers(logging.Handler):
    """Logs the messages of libraries as lines of JSON too."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            message = record.getMessage().strip()
        except Exception:  # the library's arguments do not match its format
            message = str(record.msg)
        line: dict[str, object] = {
            "time": round(record.created, 3),
            "event": record.levelname.lower(),
            "message": message,
        }
        if record.exc_info:
            line["traceback"] = logging.Formatter().formatException(record.exc_info)
        write_line(line)


PROGRESS_SECONDS = 2.0
"""Time after which a running task has a line, and between two lines of it."""


class LinesOfTasks:
    """A progress listener that logs the share of tasks that take long."""

    @contextmanager
    def task(self, what: str, total: int, unit: str) -> Iterator[Advance]:
        began = said = time.monotonic()
        done, lock = 0, threading.Lock()

        def advance(count: int) -> None:
            nonlocal done, said
            with lock:
                done += count
                now = time.monotonic()
                if now - said < PROGRESS_SECONDS or not 0 < done < total:
                    return
                said = now
                left = (now - began) * (total - done) / done
            share = {"share": round(done / total, 3), "seconds_left": round(left, 1)}
            write_line({"event": "loading", "task": what, **share})

        yield advance


class _Sink:
    """Where the lines of this process go."""

    take: Callable[[str], object] | None = None


def send_lines(take: Callable[[str], object]) -> None:
    """Give the lines of this process to `take` from now on, in place of stderr."""
    _Sink.take = take


def write_line(line: dict[str, object]) -> None:
    text = encoded(line).decode()
    if _Sink.take is None:
        write_text(text)
    else:
        _Sink.take(text)
