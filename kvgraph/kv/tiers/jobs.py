"""The loop of a tier's thread."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

MOST_FAILURES, FIRST_PAUSE = 8, 0.01
"""Failures in a row to find the next job, after which a thread gives up; seconds after the first
failure. Each pause is twice the one before: 1.3 s in all."""

Job = Callable[[], None]

log = logging.getLogger("kvgraph.tiers")


def run_jobs(next_job: Callable[[], Job | None], give_up: Callable[[], None]) -> None:
    """Run jobs until `next_job` returns None, or fails MOST_FAILURES times in a row: then call
    `give_up`. A job that fails is logged, because a faulty store or copier must not stop the
    engine."""
    failures = 0
    while failures < MOST_FAILURES:
        if failures:
            time.sleep(FIRST_PAUSE * 2 ** (failures - 1))
        try:
            if (job := next_job()) is None:
                return
            failures = -1
            job()
        except Exception:
            log.exception("a tier failed")
        failures += 1
    log.error("a tier found no next job %d times in a row: the tiers end", failures)
    give_up()
