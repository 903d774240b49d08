"""Runs one rank's part of a step."""

from __future__ import annotations

from collections.abc import Sequence
from threading import get_ident
from typing import Any

import numpy as np
import numpy.typing as npt

from kvgraph.errors import KernelError, RankError
from kvgraph.ops.group import Group
from kvgraph.runtime.native_calls import RUNNING
from kvgraph.runtime.sessions.base import Session


def run_part(
    session: Session, group: Group, arrays: Sequence[Any], *, capture: bool
) -> npt.NDArray[np.float32]:
    """Run a rank's part and return its logits; RankError names the rank that failed.

    If a part fails, the step is aborted on all ranks at once: else they would wait for this one.
    A part that was interrupted after all of it had run aborts nothing: it can run again.
    """
    before, call = group.calls, ("part", get_ident())
    try:
        RUNNING.add(call)  # once rank 0 has begun a step, no rank refuses its part
        return session.run_arrays(arrays, capture=capture)
    except KernelError as error:
        try:
            group.require_whole()
        except RankError as why:
            raise why from error
        group.abort()
        raise
    except BaseException as error:
        if isinstance(error, Exception) or not has_run(session, group, before):
            group.abort()
        raise
    finally:
        RUNNING.discard(call)


def has_run(session: Session, group: Group, before: int) -> bool:
    """Whether all of a part has run since the group's call count was `before`; False if this is
    unknown."""
    return session.runs_in_one_call and group.calls != before
