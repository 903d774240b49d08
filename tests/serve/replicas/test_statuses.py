"""Lines of the log about deployments that do not run."""

from __future__ import annotations

import threading
import time
import warnings
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("ray", reason="pip install 'kvgraph[ray]'")

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # Ray's own, of pydantic
    from kvgraph.serve.replicas import statuses

FAILED = """The deployment failed to start {} times in a row. Retrying after {} seconds. Error:
Traceback (most recent call last):
kvgraph.errors.ArtifactError: model.kvg/weights.safetensors: expected its hash, got another
"""


def found(status: str, message: str = "") -> Any:
    deployments = {"decode": SimpleNamespace(status=status, message=message)}
    return SimpleNamespace(deployments=deployments, message="")


def test_a_reason_is_one_line_until_it_is_another() -> None:
    lines: list[dict[str, object]] = []
    log = statuses.StatusLog(lines.append)
    for each in [
        found("HEALTHY"),
        found("UNHEALTHY", "A replica's health check failed."),
        found("UPDATING"),
        found("UNHEALTHY", FAILED.format(1, 2)),
        found("UPDATING", FAILED.format(2, 4)),
        found("UNHEALTHY", FAILED.format(3, 8)),
        found("HEALTHY"),
        found("HEALTHY"),
    ]:
        log.look(each)
    said = [(line["event"], line["replicas"], line.get("message")) for line in lines]
    assert said == [
        ("error", "decode", "A replica's health check failed."),
        ("error", "decode", "model.kvg/weights.safetensors: expected its hash, got another"),
        ("healthy", "decode", None),
    ]


def test_a_replica_that_waits_for_resources_is_a_reason() -> None:
    """Serve counts its deployment as one that is being updated."""
    slow = (
        "Deployment 'prefill' in application 'kvgraph' has 1 replicas that have taken more than "
        "30s to be scheduled. Resources required for each replica: {'GPU': 1}."
    )
    lines: list[dict[str, object]] = []
    log = statuses.StatusLog(lines.append)
    for each in [found("UPDATING"), found("UPDATING", slow), found("HEALTHY")]:
        log.look(each)
    assert [line["event"] for line in lines] == ["error", "healthy"]
    assert lines[0]["message"] == slow


def test_statuses_are_logged_while_the_server_runs(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = threading.Event()

    def status() -> Any:
        if asked.is_set():
            raise RuntimeError("the controller restarts")
        asked.set()
        return SimpleNamespace(applications={"mine": found("UNHEALTHY", "It is ill.")})

    monkeypatch.setattr(statuses.ray, "is_initialized", lambda: True)
    monkeypatch.setattr(statuses.serve, "status", status)
    with statuses.logged_statuses("mine", 0.01):
        assert asked.wait(60)
        said, end = "", time.monotonic() + 60
        while "It is ill." not in said and time.monotonic() < end:
            said += capsys.readouterr().err
    assert said.count("\n") == 1
    assert "restarts" not in capsys.readouterr().err
