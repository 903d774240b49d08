"""Logs one line of JSON for each request, on stderr."""

from __future__ import annotations

import logging
import os
import re
import sys
import time
from contextlib import suppress

from kvgraph.serve.answers import encoded
from kvgraph.serve.generation import Generation
from kvgraph.serve.jobs import Job


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


def write_line(line: dict[str, object]) -> None:
    """Write a line to stderr. A missing or closed reader of the log causes no error."""
    if sys.stderr is None:
        return
    with suppress(OSError, ValueError):
        try:
            sys.stderr.write(encoded(line).decode() + "\n")
        except BrokenPipeError:  # at exit Python would flush it again, and return status 120
            with open(os.devnull, "wb") as nowhere:
                os.dup2(nowhere.fileno(), sys.stderr.fileno())
