"""The lock of all that builds, traces or lowers a model in this process.

torch.export and transformers keep state of the process, such as modes of tracing and patched
functions. Two threads would change it under each other. So one thread has its turn, and another
waits for the end of it.
"""

from __future__ import annotations

import os
import threading
from contextlib import AbstractContextManager

_lock = threading.RLock()


def alone() -> AbstractContextManager[object]:
    """The lock, for a `with`: no other thread builds or traces a model in this scope.

    A scope in another one of the same thread does not wait. A forked child has a lock of its own,
    since the thread that had the parent's does not go on there.
    """
    return _lock


def _renew() -> None:
    global _lock
    _lock = threading.RLock()


os.register_at_fork(after_in_child=_renew)
