"""Silence or shorten reports of libraries, so that the user sees one sentence of kvgraph's own."""

from __future__ import annotations

import contextlib
import logging
import re
import warnings
from collections.abc import Iterator


def first_line(error: BaseException) -> str:
    """The first line of an error's message, with the second if the first ends with a colon; the
    error's type if it has no message. Addresses of objects are left out."""
    is_quoted = isinstance(error, KeyError) and len(error.args) == 1  # its text has quotes
    text = str(error.args[0] if is_quoted else error)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    said = " ".join(lines[: 2 if lines[0].endswith(":") else 1])
    return re.sub(r" at 0x[0-9a-f]+", "", said)


@contextlib.contextmanager
def quiet_loggers(*names: str) -> Iterator[None]:
    """Silence these loggers at all levels while this context is active."""
    loggers = [logging.getLogger(name) for name in names]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL + 1)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


@contextlib.contextmanager
def quiet_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
