"""Plain data into dataclasses and back: types are checked, and said."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytest

from kvgraph.contract.plain import MOST_SAID, from_plain, in_short, to_json, to_plain


@dataclass(frozen=True)
class Inner:
    dims: list[int | str]
    alias: str | None = None


@dataclass(frozen=True)
class Outer:
    count: int
    share: float
    inner: dict[str, Inner]
    anything: dict[str, object]
    notes: list[str] = field(default_factory=list)


GOOD: dict[str, Any] = {
    "count": 3,
    "share": 0.5,
    "inner": {"b": {"dims": ["n", 2], "alias": None}, "a": {"dims": [], "alias": "x"}},
    "anything": {"deep": [None, {"x": 1.5}]},
    "notes": [],
}


def test_round_trip() -> None:
    value = from_plain(Outer, GOOD)
    assert value.inner["b"] == Inner(["n", 2])
    assert to_plain(value) == GOOD
    assert list(to_plain(value)["inner"]) == ["b", "a"]  # mappings keep their order


def test_defaults_and_fields_of_later_versions() -> None:
    value = from_plain(Outer, {k: v for k, v in GOOD.items() if k != "notes"} | {"later": 1})
    assert value == from_plain(Outer, GOOD)
    assert from_plain(Outer, GOOD | {"share": 2}).share == 2.0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"count": True}, r"^count: expected int, got True$"),
        ({"count": 1.0}, r"^count: expected int, got 1.0$"),
        ({"share": "0.5"}, r"^share: expected float, got '0.5'$"),
        ({"share": 10**400}, r"^share: expected float, got int 1000+\.\.\.$"),
        ({"notes": ["a", 2]}, r"^notes\[1\]: expected str, got 2$"),
        ({"inner": {"b": {}}}, r"^inner\.b\.dims: expected list\[int \| str\], got none$"),
        ({"inner": {"b": {"dims": [None]}}}, r"^inner\.b\.dims\[0\]: expected int or str, got No"),
        ({"inner": {"b": {"dims": [], "alias": 1}}}, r"alias: expected str or null, got 1$"),
        ({"anything": [1] * 90}, r"^anything: expected dict, got list \[1, 1"),
    ],
)
def test_other_types_are_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        from_plain(Outer, GOOD | changes)


def test_a_long_text_is_said_by_its_ends() -> None:
    assert in_short("a" * MOST_SAID) == "a" * MOST_SAID
    said = in_short("first" + "a" * MOST_SAID + "last")
    assert len(said) <= MOST_SAID
    assert said.startswith("firsta")
    assert said.endswith("alast")
    assert " ... " in said


def test_equal_values_give_equal_bytes() -> None:
    assert to_json({"b": 1, "a": "é"}) == '{"b":1,"a":"é"}'.encode()
    assert to_json({"b": 1, "a": [2]}, sort=True) == b'{"a":[2],"b":1}'
    assert to_json({"b": 1}, indent=1) == b'{\n "b": 1\n}'
