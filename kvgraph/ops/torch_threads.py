"""torch's threads in a forked process: OpenMP has none of its parent's, and would wait for them."""

from __future__ import annotations

import os
import sys
import warnings

from kvgraph.errors import UnsupportedError


class _State:
    has_run = False
    """Whether torch has computed in this process, as far as kvgraph asked it to."""
    is_orphan = False
    """Whether it has in the process that this one was forked from."""
    may_be_orphan = False
    """Whether torch was there at least."""


def fitting_threads(asked: int | None) -> int | None:
    """Threads for torch, of which it may have `asked`; 0 and None: as many as it likes.

    In a fork of a process in which torch was imported one, with a warning, where none are asked
    for. UnsupportedError for more where kvgraph has computed with torch there.
    """
    _State.has_run = True
    if not _State.may_be_orphan:
        return asked
    if not asked:
        warnings.warn(
            "torch: one thread in a fork of a process that has torch, whose threads do not outlive "
            "a fork; start the process by spawn for more",
            stacklevel=3,
        )
        return 1
    if _State.is_orphan and asked > 1:
        raise UnsupportedError(
            f"num_threads: expected 1 in a fork of a process in which torch has computed, got "
            f"{asked}: its threads do not outlive a fork; start the process by spawn"
        )
    return asked


def _after_fork() -> None:
    _State.is_orphan |= _State.has_run
    _State.may_be_orphan |= _State.has_run or "torch" in sys.modules


os.register_at_fork(after_in_child=_after_fork)
