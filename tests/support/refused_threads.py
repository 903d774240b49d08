"""A system that refuses threads."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

SENTENCE = "^threads: expected that one more can start, .* raise its limit"


@contextmanager
def refused_threads(name: str | tuple[str, ...], first: int = 0) -> Iterator[None]:
    """Refuse threads whose name begins with `name`, except the `first` ones."""
    begin, left = threading.Thread.start, first

    def start(self: threading.Thread) -> None:
        nonlocal left
        if self.name.startswith(name):
            left -= 1
            if left < 0:
                raise RuntimeError("can't start new thread")
        begin(self)

    with patch.object(threading.Thread, "start", start):
        yield
