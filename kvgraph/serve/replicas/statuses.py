"""Serve's statuses of the deployments, as reasons and as lines of the log."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import ray
from ray import serve
from ray.serve.schema import ApplicationStatusOverview, DeploymentStatusOverview

from kvgraph.contract.threads import threads_needed
from kvgraph.serve.log import write_line

END_SECONDS = 2.0
"""Time in which the last question must end."""

SLOW = "taken more than"
"""Words of Serve's message about a deployment that waits for resources, or for a slow start."""

WELL = ("HEALTHY", "UPDATING", "UPSCALING", "DOWNSCALING")


def reason_of(found: ApplicationStatusOverview) -> str:
    """The error of the first replica that did not start, without its traceback."""
    reasons = map(_reason_of, found.deployments.values())
    return next((reason for reason in reasons if reason), str(found.message))


def _reason_of(deployment: DeploymentStatusOverview) -> str:
    """Why a deployment does not run; empty if nothing is said."""
    lines = [line.strip() for line in deployment.message.splitlines() if line.strip()]
    if errors := [line for line in lines if line.startswith("kvgraph.errors.")]:
        return str(errors[-1].partition(": ")[2])
    if slow := [line for line in lines if SLOW in line]:
        return str(slow[0])
    return str(lines[-1]) if lines and deployment.status not in WELL else ""


class StatusLog:
    """Writes a line when a deployment has another reason not to run, and when it runs again."""

    def __init__(self, write: Callable[[dict[str, object]], None] = write_line) -> None:
        self._write = write
        self._reasons: dict[str, str] = {}

    def look(self, found: ApplicationStatusOverview) -> None:
        for name, deployment in found.deployments.items():
            reason, before = _reason_of(deployment), self._reasons.get(name, "")
            if not reason and deployment.status != "HEALTHY":
                continue  # it starts: that is no news of the reason
            self._reasons[name] = reason
            if reason != before:
                about = {"event": "error" if reason else "healthy", "replicas": name}
                line: dict[str, object] = {"time": round(time.time(), 3), **about}
                self._write(line | ({"message": reason} if reason else {}))


@contextmanager
def logged_statuses(application: str, pause: float) -> Iterator[None]:
    """Log why replicas do not run while this is active, from a thread: the controller may hang."""
    ended, log = threading.Event(), StatusLog()

    def watch() -> None:
        while not ended.wait(pause):
            with suppress(Exception):  # the controller restarts
                if ray.is_initialized():  # otherwise Serve would start a Ray
                    found = serve.status().applications.get(application)
                    if found is not None and not ended.is_set():
                        log.look(found)

    watching = threading.Thread(target=watch, daemon=True)
    with threads_needed():
        watching.start()
    try:
        yield
    finally:
        ended.set()
        watching.join(END_SECONDS)
