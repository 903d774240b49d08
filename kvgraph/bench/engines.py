"""Run the engines, artifacts and peers, each in its own process, and collect their results."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from kvgraph.bench.machine import thread_environment
from kvgraph.contract.leftovers import scratch
from kvgraph.contract.plain import JsonObject
from kvgraph.contract.threads import threads_needed

WORKER = Path(__file__).with_name("worker.py")
SECONDS_TO_LEAVE = 30.0
"""Seconds that a process has to end after its last event."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSpec:
    """An engine to run: `adapter` (a file) in the interpreter `python` on `model`.

    `ours`: whether it is an artifact; only artifacts are measured against the limits. `prepares`:
    whether the adapter first converts the model to its own format. `versions`: versions known
    before the engine reports any.
    """

    name: str
    ours: bool
    precision: str
    adapter: Path
    python: str
    model: Path
    prepares: bool = False
    environment: Mapping[str, str] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)


@dataclass(slots=True)
class CaseResult:
    """Seconds of every repeat (see protocol.py), or the error. `rss_bytes`: peak of the process up
    to the end of this case."""

    t1_s: list[float] = field(default_factory=list)
    tl_s: list[float] = field(default_factory=list)
    tn_s: list[float] = field(default_factory=list)
    first_ids: list[int] = field(default_factory=list)
    rss_bytes: int | None = None
    error: str | None = None


@dataclass(slots=True)
class EngineResult:
    """Results of an engine's processes. `starts_s`: seconds from start to first token, of each."""

    name: str
    ours: bool
    precision: str
    versions: dict[str, str] = field(default_factory=dict)
    settings: str = ""
    pool_dtype: str = ""
    pool_bytes: int | None = None
    model_bytes: int | None = None
    prepare_s: float | None = None
    starts_s: list[float] = field(default_factory=list)
    peak_rss_bytes: int | None = None
    cases: dict[str, CaseResult] = field(default_factory=dict)
    error: str | None = None


def run_engine(
    spec: EngineSpec,
    job: Mapping[str, Any],
    *,
    timeout: float,
    progress: Callable[[str], None] = lambda stage: None,
) -> EngineResult:
    """Prepare, start once for the first token only, start again and measure all cases.

    Failures are in the result: `error` of the engine, or of a case. `timeout`: seconds for each
    process.
    """
    result = EngineResult(spec.name, spec.ours, spec.precision, dict(spec.versions))
    full = dict(job) | {
        "adapter": str(spec.adapter),
        "model": str(spec.model),
        "precision": spec.precision,
    }
    phases: list[JsonObject] = [{"phase": "prepare"}] if spec.prepares else []
    phases += [{"phase": "measure", "cases": []}, {"phase": "measure"}]
    for phase in phases:
        with _partial(full | phase) as extra:
            result.error = _run_process(spec, full | phase | extra, result, timeout, progress)
        if result.error:
            break
    return result


@contextmanager
def _partial(job: JsonObject) -> Iterator[JsonObject]:
    """A temporary folder for a worker's conversion, removed at the end in any case."""
    if job["phase"] != "prepare":
        yield {}
        return
    with tempfile.TemporaryDirectory(
        prefix=".kvgraph-bench.", dir=job["folder"], ignore_cleanup_errors=True
    ) as partial:
        yield {"partial": partial}


def _run_process(
    spec: EngineSpec,
    job: JsonObject,
    result: EngineResult,
    timeout: float,
    progress: Callable[[str], None],
) -> str | None:
    """Run one worker from start to end; return the reason of a failure, or None."""
    progress("preparing the model" if job["phase"] == "prepare" else "starting")
    with scratch("bench") as folder:
        path = folder / "job.json"
        path.write_text(json.dumps(job), encoding="utf-8")
        log = folder / "log"
        with log.open("wb") as file, _worker(spec, path, file, job["threads"]) as process:
            began = time.monotonic()
            expired = threading.Event()
            timer = threading.Timer(timeout, _expire, (process, expired))
            with threads_needed():
                timer.start()
            try:
                said = _take_events(process, began, result, progress)
                with suppress(subprocess.TimeoutExpired):  # it is killed below
                    process.wait(SECONDS_TO_LEAVE)
            finally:
                timer.cancel()
        if expired.is_set():
            return f"expected to end within {timeout:g} s, did not"
        return _reason(process.returncode, log) if said == "" else said


@contextmanager
def _worker(
    spec: EngineSpec, job: Path, log: IO[bytes], threads: int
) -> Iterator[subprocess.Popen[str]]:
    environment = thread_environment(threads) | {
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        **spec.environment,
    }
    if not spec.ours:
        environment.pop("PYTHONPATH", None)  # this interpreter's packages are not the peer's
    process = subprocess.Popen(
        [spec.python, str(WORKER), str(job)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=log,
        env=environment,
        text=True,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        _kill(process)
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def _expire(process: subprocess.Popen[str], expired: threading.Event) -> None:
    expired.set()
    _kill(process)


def _kill(process: subprocess.Popen[str]) -> None:
    """Kill the process and all processes that it started."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _take_events(
    process: subprocess.Popen[str],
    began: float,
    result: EngineResult,
    progress: Callable[[str], None],
) -> str | None:
    """Read events into `result`. Returns None after "done", "" if the events end without it, and
    otherwise the worker's error."""
    assert process.stdout is not None
    for line in process.stdout:
        event = json.loads(line)
        match event["event"]:
            case "prepared":
                result.prepare_s = event["seconds"]
            case "first_token":
                result.starts_s.append(event["at"] - began)
                for name, value in event["about"].items():
                    setattr(result, name, value)
            case "started":
                progress(event["name"])
            case "case":
                fields = {k: v for k, v in event.items() if k not in ("event", "name")}
                result.cases[event["name"]] = CaseResult(**fields)
            case "error":
                return str(event["message"])
            case "done":
                result.peak_rss_bytes = event["peak_rss_bytes"]
                return None
    return ""


def _reason(status: int, log: Path) -> str:
    """Reason why a worker ended without an event: its signal or status, and its last line."""
    lines = log.read_text(errors="replace", encoding="utf-8").strip().splitlines()
    how = f"signal {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
    return f"the process ended with {how}" + (f": {lines[-1].strip()[:300]}" if lines else "")
