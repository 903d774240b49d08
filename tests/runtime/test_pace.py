"""How many tokens of prompts a step carries: what steps took decides."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from kvgraph.runtime.pace import (
    BURST_SECONDS,
    FIRST_CHUNK,
    SMALLEST_CHUNK,
    FixedPace,
    StepPace,
)

SECONDS: dict[str, Callable[[int, int], float]] = {
    "processor": lambda rows, tokens: 6e-3 + 0.5e-3 * rows + 0.4e-3 * tokens,
    "slow processor": lambda rows, tokens: 13e-3 + 2.2e-3 * rows + 2.2e-3 * tokens,
    "GPU": lambda rows, tokens: max(6.7e-3, 0.04e-3 * (rows + tokens)),
}


@pytest.fixture(params=SECONDS)
def seconds(request: pytest.FixtureRequest) -> Callable[[int, int], float]:
    return SECONDS[request.param]


def taught(seconds: Callable[[int, int], float], rng: random.Random) -> StepPace:
    """A pace that has seen steps of up to 32 rows, as it chose them itself."""
    pace = StepPace()
    for _ in range(400):
        rows = rng.randint(0, 32)
        most = pace.prompt_tokens(rows, 1) if rng.random() < 0.6 else 0
        tokens = 768 if most is None else min(most, 768)
        if rows or tokens:
            pace.learn(rows, tokens, seconds(rows, tokens) * rng.uniform(1, 1.1))
    return pace


def ratio_after(
    steps: int, pace: StepPace, seconds: Callable[[int, int], float], rows: int, waiting: int
) -> float:
    """Time of a step with prompts against one without, after `steps` that the pace chose."""
    for _ in range(steps):
        chunk = pace.prompt_tokens(rows, waiting)
        assert chunk is not None
        pace.learn(rows, chunk, seconds(rows, chunk))
    chunk = pace.prompt_tokens(rows, waiting)
    assert chunk is not None
    return seconds(rows, chunk) / seconds(rows, 0)


@pytest.mark.parametrize("rows", [4, 16, 32])
def test_a_step_with_a_prompt_takes_about_two_without(
    seconds: Callable[[int, int], float], rows: int
) -> None:
    pace = taught(seconds, random.Random(0))
    tokens = pace.prompt_tokens(rows, 1)
    assert tokens is not None
    assert tokens > SMALLEST_CHUNK
    assert 1.5 < seconds(rows, tokens) / seconds(rows, 0) < 3


def test_prompts_get_more_the_more_of_them_wait(seconds: Callable[[int, int], float]) -> None:
    pace = taught(seconds, random.Random(1))
    pace.learn(8, 768, seconds(8, 768))
    pace.learn(8, 0, seconds(8, 0))
    tokens = [pace.prompt_tokens(8, waiting) or 0 for waiting in (0, 4, 8)]
    assert tokens[1] == pytest.approx(1.5 * tokens[0], abs=2)
    assert tokens[2] == pytest.approx(2 * tokens[0], abs=2)


@pytest.mark.parametrize("is_idle", [True, False])
def test_a_burst_starts_together(is_idle: bool) -> None:
    """If no row decodes when it comes, until an eighth of the rows' number waits."""
    seconds = SECONDS["processor"]
    pace = taught(seconds, random.Random(4))
    for tokens in (96, 192, 384, 768, 1536):
        pace.learn(8, tokens, seconds(8, tokens))
    pace.learn(8, 0, seconds(8, 0))
    pace.prompt_tokens(0 if is_idle else 8, 0)
    if is_idle:
        assert pace.prompt_tokens(0, 32) is None
    for rows, waiting, in_burst in ((8, 24, True), (24, 4, True), (24, 3, False), (8, 9, False)):
        chunk = pace.prompt_tokens(rows, waiting)
        assert chunk is not None
        prompts = seconds(rows, chunk) - seconds(rows, 0)
        share = seconds(rows, 0) * (rows + waiting) / rows
        assert prompts == pytest.approx(BURST_SECONDS if in_burst and is_idle else share, rel=0.2)


def test_the_time_of_many_more_rows_is_not_ascribed_to_prompts(
    seconds: Callable[[int, int], float],
) -> None:
    """Only steps of 1 and 2 rows were measured; then 24 rows decode, and 8 prompts come."""
    pace = StepPace()
    for rows, tokens in ((0, 128), (1, 0), (1, 0), (2, 0), (0, 768)):
        pace.learn(rows, tokens, seconds(rows, tokens))
    assert pace.prompt_tokens(24, 8) == 0
    pace.learn(24, 0, seconds(24, 0))
    assert 1.5 < ratio_after(6, pace, seconds, 24, 8) < 3


def test_a_pause_in_the_first_step_of_many_rows_is_bounded() -> None:
    """The time of a step grows at most as the number of its rows does."""
    seconds = SECONDS["slow processor"]
    pace = StepPace()
    for rows, tokens in ((0, 128), (1, 0), (2, 0), (2, 0), (0, 768)):
        pace.learn(rows, tokens, seconds(rows, tokens))
    pace.learn(8, 0, 30.0)
    chunk = FIRST_CHUNK
    for _ in range(4):
        pace.learn(8, chunk, seconds(8, chunk))
        chunk = pace.prompt_tokens(8, 1) or 0
    assert seconds(8, chunk) < 5 * seconds(8, 0)


@pytest.mark.parametrize("tokens", [0, 100])
def test_one_long_pause_is_soon_forgotten(
    seconds: Callable[[int, int], float], tokens: int
) -> None:
    pace = taught(seconds, random.Random(2))
    pace.learn(8, 0, seconds(8, 0))
    before = pace.prompt_tokens(8, 1)
    pace.learn(8, tokens, 30.0)
    for _ in range(8):
        chunk = pace.prompt_tokens(8, 1)
        assert chunk is not None
        pace.learn(8, chunk, seconds(8, chunk))
        pace.learn(8, 0, seconds(8, 0))
    after = pace.prompt_tokens(8, 1)
    assert before is not None
    assert after is not None
    assert before / 1.5 < after < 1.5 * before


@pytest.mark.parametrize("tokens", [12, 512])
def test_slow_first_steps_are_not_learned(
    seconds: Callable[[int, int], float], tokens: int
) -> None:
    """They load, compile and capture what later ones find."""
    slow, quick = StepPace(), StepPace()
    for pace, extra in ((slow, 10.0), (quick, 0.0)):
        pace.learn(0, tokens, seconds(0, tokens) + extra)
        pace.learn(1, 0, seconds(1, 0) + extra)
        for step in range(50):
            chunk = (pace.prompt_tokens(4, 1) or 0) * (step % 4 > 0)
            pace.learn(4, chunk, seconds(4, chunk))
    assert slow.prompt_tokens(4, 1) == quick.prompt_tokens(4, 1)


def test_steps_without_prompts_are_measured_under_any_load(
    seconds: Callable[[int, int], float],
) -> None:
    """Prompts always wait, and what was learned of decode steps was wrong."""
    pace = taught(
        lambda rows, tokens: 5 * seconds(rows, 0) + seconds(rows, tokens), random.Random(3)
    )
    assert 1.5 < ratio_after(300, pace, seconds, 8, 1) < 3


def test_a_chunk_is_at_most_twice_the_one_before() -> None:
    pace = StepPace()
    pace.learn(0, 512, 0.01)
    for _ in range(4):
        pace.learn(8, 0, 0.01)
    pace.learn(8, 48, 0.01)
    assert pace.prompt_tokens(8, 1) == 96


def test_prompts_without_a_measurable_cost_stay_bounded() -> None:
    """Their learned time shrinks until a float cannot hold it."""
    pace = StepPace()
    for _ in range(4):
        pace.learn(4, 0, 0.01)
    pace.learn(4, 16, 0.02)
    for _ in range(4000):
        pace.learn(4, 16, 0.0099)
    pace.learn(4, 0, 0.01)
    assert pace.prompt_tokens(4, 1) == FIRST_CHUNK


def test_nothing_is_bounded_where_no_row_decodes() -> None:
    pace = StepPace()
    assert pace.prompt_tokens(0, 4) is None
    assert pace.prompt_tokens(1, 1) == FIRST_CHUNK


def test_a_fixed_number_bounds_all_steps_but_those_of_a_burst() -> None:
    pace = FixedPace(48)
    pace.learn(4, 48, 1.0)
    assert pace.prompt_tokens(4, 5) == 48
    assert pace.prompt_tokens(0, 9) is None
    assert pace.prompt_tokens(8, 2) is None
    assert pace.prompt_tokens(8, 1) == 48
    assert pace.prompt_tokens(8, 9) == 48
