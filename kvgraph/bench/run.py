"""Run a plan: limits, engine, limits, engine, ..., limits; and report all of it as plain data."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from kvgraph.bench import machine
from kvgraph.bench.engines import EngineResult, run_engine
from kvgraph.bench.figures import Figure, make_figures
from kvgraph.bench.limits import Limits, read_limits
from kvgraph.bench.plan import BenchPlan, engine_job
from kvgraph.contract.plain import to_plain
from kvgraph.progress import Progress

SCHEMA_VERSION = 1


@dataclass(frozen=True, slots=True)
class Report:
    """Results of a run. `loads`: load averages of the machine before and after the run."""

    plan: BenchPlan
    machine: dict[str, object]
    loads: tuple[float, float]
    readings: list[Limits]
    results: list[EngineResult]
    figures: list[Figure]

    @property
    def failed(self) -> list[EngineResult]:
        """Results of artifacts that failed; a peer that fails is only a line of the table."""
        return [result for result in self.results if result.ours and result.error]


def run(
    plan: BenchPlan,
    *,
    timeout: float,
    read_bytes: int | None = None,
    progress: Progress = lambda stage: None,
) -> Report:
    """Measure a plan, one process at a time; limits are read before and after every engine."""
    before, threads = machine.load_average(), plan.settings.threads
    progress("limits")
    readings, results = [read_limits(threads, read_bytes)], []
    for spec in plan.engines:
        step = partial(_show, progress, spec.name)
        results.append(run_engine(spec, engine_job(plan, spec), timeout=timeout, progress=step))
        progress("limits")
        readings.append(read_limits(threads, read_bytes))
    loads = (before, machine.load_average())
    figures = make_figures(plan.cases, results, plan.counts, readings)
    return Report(plan, machine.describe(), loads, readings, results, figures)


def _show(progress: Progress, name: str, stage: str) -> None:
    progress(f"{name}: {stage}")


def report_data(report: Report) -> dict[str, object]:
    """The whole report as plain data: settings, machine, seconds of every repeat, every reading."""
    plan = report.plan
    return {
        "schema_version": SCHEMA_VERSION,
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "machine": report.machine,
        "load_average": {"before": report.loads[0], "after": report.loads[1]},
        "settings": to_plain(plan.settings),
        "cases": [
            to_plain(case) | {"batch": case.batch, "prompt_tokens": sum(case.lengths)}
            for case in plan.cases
        ],
        "limits": to_plain(report.readings),
        "counts": {
            name: to_plain(counts) | {"kv_bytes": {str(k): v for k, v in counts.kv_bytes.items()}}
            for name, counts in plan.counts.items()
        },
        "engines": to_plain(report.results),
        "figures": to_plain(report.figures),
    }


def is_report(path: Path) -> bool:
    """Whether a file holds a report of `report_data`, of any version."""
    try:
        data = json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        return False
    return isinstance(data, dict) and {"schema_version", "machine", "figures"} <= data.keys()
