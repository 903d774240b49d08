"""Requests with equal prompts that start together: pages are computed once, and hashed once."""

from __future__ import annotations

from collections import Counter
from hashlib import sha256
from typing import Any

import pytest

from kvgraph.kv.pool import identity as identity_module
from tests.runtime.simulation import PAGE, Simulation, expected_output, ids, shape


def sharing(count: int, *, pages: int = 60, budget: int = 768, rows: int = 16) -> Simulation:
    """`count` prompts of 41 tokens that differ in the last one, over pages of 4."""
    simulation = Simulation(pages, budget=budget, rows=rows, prefix=True)
    for i in range(count):
        simulation.submit([*range(100, 140), i], 3)
    return simulation


def test_equal_prompts_are_computed_once() -> None:
    simulation = sharing(8)
    assert shape(simulation.step()) == [("r0", 41)]
    assert shape(simulation.step()) == [("r0", 1), *((f"r{i}", 1) for i in range(1, 8))]
    assert simulation.kv.get_metrics_aggregated().input_tokens == 41 + 7
    simulation.drain()
    for request in simulation.arrivals:
        prompt = request.context.tokens[:41].tolist()
        assert request.context.tokens[41:].tolist() == expected_output(prompt, 3, ())
    assert simulation.idle


@pytest.mark.parametrize("budget", [1, 3, 4, 7, 16, 40, 41, 50])
def test_equal_prompts_in_chunks_are_computed_once(budget: int) -> None:
    """Also while a page is computed in parts."""
    simulation = sharing(5, budget=budget)
    simulation.drain()
    assert simulation.kv.get_metrics_aggregated().input_tokens == 41 + 4
    assert simulation.idle


def test_others_pass_a_request_that_is_held_back() -> None:
    """Twins, and twins of others: all start in two steps, and each queue stays in its order."""
    simulation = Simulation(60, budget=768, rows=8, prefix=True)
    for i in (0, 0, 1, 1, 2):
        simulation.submit([i] * 9, 3)
    assert shape(simulation.step()) == [("r0", 9), ("r2", 9), ("r4", 9)]
    assert ids(simulation.scheduler.waiting) == ["r1", "r3"]
    batch = simulation.step()
    assert shape(batch) == [("r0", 1), ("r2", 1), ("r4", 1), ("r1", 1), ("r3", 1)]
    assert ids(simulation.scheduler.running) == ["r0", "r1", "r2", "r3", "r4"]
    simulation.drain()
    assert simulation.idle


def test_prompts_that_part_ways_wait_for_what_they_share() -> None:
    """r1 waits for the first page of r0, r2 for the second page of r1; r3 shares none."""
    simulation = Simulation(60, budget=768, prefix=True)
    simulation.submit([0] * 4 + [1] * 9, 3)
    simulation.submit([0] * 4 + [2] * 9, 3)
    simulation.submit([0] * 4 + [2] * 8 + [3], 3)
    simulation.submit([4] * 5, 3)
    assert shape(simulation.step()) == [("r0", 13), ("r3", 5)]
    assert shape(simulation.step()) == [("r0", 1), ("r3", 1), ("r1", 9)]
    assert shape(simulation.step()) == [("r0", 1), ("r1", 1), ("r3", 1), ("r2", 1)]
    simulation.drain()
    assert simulation.idle


@pytest.mark.parametrize(
    ("prefix", "identities"),
    [
        (False, [{}, {}]),
        (True, [{"cache_salt": b"a"}, {"cache_salt": b"b"}]),
        (True, [{"adapter": "a"}, {"adapter": "b"}]),
    ],
)
def test_prompts_that_share_no_pages_start_together(
    prefix: bool, identities: list[dict[str, Any]]
) -> None:
    simulation = Simulation(20, prefix=prefix, budget=64)
    for identity in identities:
        simulation.submit(9, 2, **identity)
    assert shape(simulation.step()) == [("r0", 9), ("r1", 9)]
    simulation.drain()
    assert simulation.idle


def test_a_prompt_shorter_than_a_page_waits_for_none() -> None:
    simulation = Simulation(20, prefix=True)
    simulation.submit(4, 2)
    simulation.submit(4, 2)
    assert shape(simulation.step()) == [("r0", 4), ("r1", 4)]


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_a_row_that_others_wait_for_is_cancelled(steps: int) -> None:
    """The next of them computes what it had not."""
    simulation = sharing(3, budget=16)
    for _ in range(steps):
        simulation.step()
    assert simulation.scheduler.cancel("r0")
    simulation.drain()
    computed = simulation.kv.get_metrics_aggregated().input_tokens
    assert computed == 41 + 1 + (1 if steps == 3 else 0)
    assert simulation.idle


def test_admission_hashes_each_page_of_a_prompt_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """It asks for its pages' identities to see if there is room, what to wait for, and to take them
    (r1 in four steps, since r0 has the pages that it needs)."""
    hashed = Counter[bytes]()

    def counted(data: bytes) -> Any:
        hashed[data] += 1
        return sha256(data)

    monkeypatch.setattr(identity_module, "sha256", counted)
    simulation = Simulation(6, budget=24, prefix=True)
    simulation.submit(range(13), 4)
    simulation.submit(range(20, 36), 2)
    simulation.submit(range(40, 53), 2)
    assert shape(simulation.step()) == [("r0", 13)]
    for _ in range(3):
        assert shape(simulation.step()) == [("r0", 1)]
    simulation.drain()
    assert simulation.idle
    pages = {data: count for data, count in hashed.items() if len(data) == 32 + 4 * PAGE}
    assert len(pages) >= 3 + 3 + 3
    assert set(pages.values()) == {1}
