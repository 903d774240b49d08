"""The order of the scheduler's queues, and how the tokens of a step are shared out."""

from __future__ import annotations

import pytest

from kvgraph.runtime.scheduler import _cut_to_budget
from tests.runtime.simulation import Simulation, ids


@pytest.mark.parametrize("landed", [True, False])
def test_a_request_whose_load_ended_keeps_its_place(
    monkeypatch: pytest.MonkeyPatch, landed: bool
) -> None:
    """Among those that run, or as it is computed, among those that wait."""
    simulation = Simulation(10, rows=2)
    for _ in range(3):
        simulation.submit(2, 3)
    simulation.step()
    scheduler = simulation.scheduler
    scheduler.loading.append(scheduler.running.pop(0))  # as if its pages came from a tier
    monkeypatch.setattr(simulation.kv, "poll", lambda: {"r0": landed})
    scheduler._settle_loads()
    queues = ids(scheduler.running), ids(scheduler.waiting)
    assert queues == ((["r0", "r1"], ["r2"]) if landed else (["r1"], ["r0", "r2"]))


@pytest.mark.parametrize(
    ("budget", "prompts", "lengths"),
    [
        (100, 8, {"r0": 1, "r1": 8}),
        (100, 30, {"r0": 1, "r1": 20, "r2": 10}),
        (100, 100, {"r0": 1, "r1": 20, "r2": 20}),
        (30, 25, {"r0": 1, "r1": 20, "r2": 5}),
        (30, 100, {"r0": 1, "r1": 20, "r2": 9}),
    ],
)
def test_prompts_share_what_a_step_has_for_them(
    budget: int, prompts: int, lengths: dict[str, int]
) -> None:
    """Two prompts of 20 tokens next to a row that decodes."""
    simulation = Simulation(60)
    for length in (1, 20, 20):
        simulation.submit(length, 2)
    rows = _cut_to_budget(
        simulation.arrivals, tokens=budget, prompt_tokens=prompts, scored_tokens=128
    )
    assert {row.request_id: row.context.active_length for row in rows} == lengths
