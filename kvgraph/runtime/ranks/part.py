"""A rank's part of a step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from kvgraph.errors import KernelError, RankError
from kvgraph.ops.group import Group
from kvgraph.runtime.sessions.base import Session


def run_part(
    session: Session, group: Group, arrays: Sequence[Any], *, capture: bool
) -> npt.NDArray[np.float32]:
    """Logits of the step; RankError names the rank for which it failed.

    A part that fails fails the step of all ranks at once: else they would wait for this one. One
    that was interrupted when all of it had run does not: it can run again.
    """
    before = group.calls
    try:
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


def has_run(session: Session, group: Group, before: int) -> bool:
    """Whether all of a part has run that began at `before` calls of the group; False where that is
    not known."""
    return session.runs_in_one_call and group.calls != before
