"""What test functions cost, and the sample of the costly ones that `make test` takes.

`tests/costs.json` has the seconds of each function's cases, of those that take one or more, as
`pytest --write-costs` measures them on a machine that does nothing else. What fixtures take is not
counted: a file's first test pays it.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import pytest

from tools.seeded_bugs import BUGS

FILE = Path(__file__).parents[1] / "costs.json"

OF_A_FUNCTION = 2.0
"""Seconds of a function's cases in the sample: one case at least."""

OF_A_CASE = 3.0
"""Functions whose cases take longer are left out, but a file keeps its cheapest one."""

ALWAYS = frozenset(
    (
        *(bug.test.partition("[")[0] for bug in BUGS),
        "tests/kv/test_kv_model.py::test_every_read_is_of_the_rows_own_prefix",
        "tests/kv/test_tier_model.py::test_every_read_is_of_the_rows_own_prefix",
    )
)
"""Functions that are in the sample with all their cases."""


@cache
def costs() -> dict[str, float]:
    """Seconds of each function, by its name `tests/FILE.py::FUNCTION`."""
    found: dict[str, float] = json.loads(FILE.read_text())
    return found


def of_files() -> dict[str, float]:
    """Seconds of each file; 0 for one without."""
    total: dict[str, float] = defaultdict(float)
    for function, seconds in costs().items():
        total[file_of(function)] += seconds
    return total


def function_of(item: pytest.Item) -> str:
    return item.nodeid.partition("[")[0]


def file_of(function: str) -> str:
    return function.partition("::")[0]


def cases_in_sample(function: str, cases: int) -> int:
    """How many of a function's cases the sample has."""
    seconds = costs().get(function, 0.0)
    if function in ALWAYS or seconds <= OF_A_FUNCTION:
        return cases
    if seconds / cases > OF_A_CASE:
        return 0
    return max(1, int(cases * OF_A_FUNCTION / seconds))


def in_sample(items: Sequence[pytest.Item]) -> set[pytest.Item]:
    """Those of `items` that are in the sample, evenly spread over each function's cases."""
    cases: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        cases[function_of(item)].append(item)
    counts = {function: cases_in_sample(function, len(of)) for function, of in cases.items()}
    kept_of_file = Counter[str]()
    for function, count in counts.items():
        kept_of_file[file_of(function)] += count
    for file in (file for file, count in kept_of_file.items() if not count):
        cheapest = min(
            (function for function in cases if file_of(function) == file),
            key=lambda function: costs()[function] / len(cases[function]),
        )
        counts[cheapest] = 1
    return {
        cases[function][k * len(cases[function]) // count]
        for function, count in counts.items()
        for k in range(count)
    }


class Recorder:
    """A plugin of pytest that writes `tests/costs.json`, with any number of processes."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = defaultdict(float)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call":
            self._seconds[report.nodeid.partition("[")[0]] += report.duration

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if not hasattr(session.config, "workerinput"):
            found = {
                name: round(seconds, 1)
                for name, seconds in sorted(self._seconds.items())
                if seconds >= 1
            }
            FILE.write_text(json.dumps(found, indent=1) + "\n")
