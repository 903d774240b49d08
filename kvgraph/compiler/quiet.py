"""Silence or shorten reports of libraries, so that the user sees one sentence of kvgraph's own."""

from __future__ import annotations

import contextlib
import logging
import re
import warnings
from collections.abc import Iterator


def first_line(error: BaseException) -> str:
    """First line of an error's message, without addresses of objects; its type if it has none."""
    text = str(error).strip() or type(error).__name__
    return re.sub(r" at 0x[0-9a-f]+", "", text.splitlines()[0])


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
