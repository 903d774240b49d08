"""torch's threads in a forked process, which lacks the parent's OpenMP threads and could hang."""

from __future__ import annotations

import os
import sys
import warnings

from kvgraph.errors import UnsupportedError


class _State:
    has_run = False
    """Whether kvgraph has computed with torch in this process."""
    is_orphan = False
    """Whether kvgraph had computed with torch in the parent of this forked process."""
    may_be_orphan = False
    """Whether torch was imported in the parent of this forked process."""


def fitting_threads(asked: int | None) -> int | None:
    """Number of threads for torch: `asked`; 0 and None mean torch's default.

    In a fork of a process that imported torch the default is one, with a warning. UnsupportedError
    for more threads if kvgraph had computed with torch in that process.
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
