"""The sample of costly tests that `make test` takes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support import costs

ROOT = Path(__file__).parents[1]


def test_every_function_is_there() -> None:
    for function in {*costs.costs(), *costs.ALWAYS}:
        file, _, name = function.partition("::")
        assert f"def {name.partition('[')[0].rpartition('::')[2]}(" in (ROOT / file).read_text()


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        (0.0, [0, 1, 2, 3]),
        (3.0, [0, 1, 2, 3]),
        (4.0, [0, 1, 2]),
        (6.0, [0, 2]),
        (30.0, [0]),
        (36.0, []),
    ],
)
def test_cases_of_a_function(
    seconds: float, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    costly = [f"tests/a.py::costly[{number}]" for number in range(4)]
    taken = _sample({"tests/a.py::costly": seconds}, monkeypatch, "tests/a.py::cheap", *costly)
    assert taken == ["tests/a.py::cheap", *(costly[number] for number in expected)]


def test_a_file_keeps_its_cheapest_function(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("tests/a.py::first", "tests/a.py::second", "tests/b.py::other")
    seconds = {names[0]: 20.0, names[1]: 10.0}
    assert _sample(seconds, monkeypatch, *names) == [names[1], names[2]]


def test_some_functions_are_always_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    always = min(costs.ALWAYS)
    names = [f"{always}[{number}]" for number in range(4)]
    assert _sample({always: 100.0}, monkeypatch, *names) == names


def _sample(seconds: dict[str, float], patch: pytest.MonkeyPatch, *names: str) -> list[str]:
    patch.setattr(costs, "costs", lambda: seconds)
    patch.setattr(costs, "OF_A_FUNCTION", 3.0)
    patch.setattr(costs, "OF_A_CASE", 8.0)
    items: list[Any] = [_Item(name) for name in names]
    kept = costs.in_sample(items)
    return [item.nodeid for item in items if item in kept]


@dataclass(eq=False)
class _Item:
    """A test as far as its sample looks at it."""

    nodeid: str
