"""Scheduler over a simulated model whose next token depends on every token that it has cached."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvgraph.errors import RequestError
from tests.runtime.simulation import (
    ALPHABET,
    PAGE,
    Simulation,
    expected_output,
    ids,
    next_token,
    shape,
)

# -- admission


def test_nothing_to_do() -> None:
    assert Simulation(4).scheduler.schedule() is None


def test_only_the_head_of_the_queue_is_admitted() -> None:
    """r2 would fit with r0, but r1 came first."""
    simulation = Simulation(4)
    simulation.submit(8, 4)
    simulation.submit(12, 2)
    simulation.submit(1, 2)
    assert shape(simulation.step()) == [("r0", 8)]
    assert ids(simulation.scheduler.waiting) == ["r1", "r2"]
    for _ in range(3):
        assert shape(simulation.step()) == [("r0", 1)]
    assert shape(simulation.step()) == [("r1", 12), ("r2", 1)]
    simulation.drain()
    assert simulation.idle


def test_admission_counts_the_pages_of_the_whole_prompt() -> None:
    """The first chunk of r1 would fit into the page that is free, its prompt would not."""
    simulation = Simulation(4, budget=13)
    simulation.submit(11, 1)
    simulation.submit(8, 1)
    assert shape(simulation.step()) == [("r0", 11)]
    assert shape(simulation.step()) == [("r1", 8)]


def test_admission_stops_at_the_batch_size() -> None:
    simulation = Simulation(10, rows=2)
    for _ in range(3):
        simulation.submit(2, 3)
    assert shape(simulation.step()) == [("r0", 2), ("r1", 2)]
    assert ids(simulation.scheduler.waiting) == ["r2"]
    simulation.drain()
    assert simulation.idle


def test_tiers_that_answer_behind_the_question_are_asked_in_the_next_step() -> None:
    """A look-up may end in its own thread at any time: between two questions of one step, too."""
    simulation = Simulation(4)
    simulation.submit(8, 1)
    said = iter([False, False])
    simulation.scheduler.kv.prefetch = lambda contexts: [next(said, True)]  # type: ignore[method-assign]
    assert simulation.scheduler.schedule() is None
    assert shape(simulation.step()) == [("r0", 8)]


@pytest.mark.parametrize(("prompt", "new_tokens", "pages"), [(12, 6, 5), (17, 1, 5), (1, 400, 100)])
def test_a_request_larger_than_the_pool_is_refused(
    prompt: int, new_tokens: int, pages: int
) -> None:
    simulation = Simulation(4)
    message = (
        rf"request 'r0': expected at most 4 pages .*got {prompt + new_tokens} tokens .*need {pages}"
    )
    with pytest.raises(RequestError, match=message):
        simulation.submit(prompt, new_tokens)
    assert simulation.idle
    assert simulation.scheduler.schedule() is None


@pytest.mark.parametrize(("prompt", "new_tokens"), [(1, 16), (16, 1), (8, 9)])
def test_a_request_as_large_as_the_pool_completes(prompt: int, new_tokens: int) -> None:
    """16 slots hold 17 tokens: the last one generated is never cached."""
    simulation = Simulation(4)
    request = simulation.submit(prompt, new_tokens)
    simulation.drain()
    assert request.context.current_length == 17
    assert request.finish_reason == "length"
    assert simulation.idle


# -- chunks


@pytest.mark.parametrize("budget", [1, 3, 4, 5, 11, 12])
def test_a_long_prompt_is_processed_in_chunks(budget: int) -> None:
    simulation = Simulation(4, budget=budget)
    request = simulation.submit(range(11), 1)
    chunks = []
    while batch := simulation.step():
        chunks += [n for _, n in shape(batch)]
        is_last = sum(chunks) == 11
        assert batch.sampled == ([request] if is_last else [])
    assert chunks == [budget] * (11 // budget) + [11 % budget] * bool(11 % budget)
    assert request.context.tokens.tolist() == [*range(11), next_token(range(11))]


def test_decode_rows_go_on_beside_the_chunks_of_a_long_prompt() -> None:
    simulation = Simulation(20, budget=6)
    simulation.submit(2, 20)
    simulation.submit(3, 20)
    simulation.step()
    simulation.submit(14, 2)
    for chunk in (4, 4, 4, 2):
        batch = simulation.step()
        assert shape(batch) == [("r0", 1), ("r1", 1), ("r2", chunk)]
        assert batch is not None
        assert ids(batch.sampled) == ["r0", "r1"] + ["r2"] * (chunk == 2)
    assert shape(simulation.step()) == [("r0", 1), ("r1", 1), ("r2", 1)]


def test_what_a_prompt_leaves_of_the_budget_goes_to_the_next() -> None:
    simulation = Simulation(20, budget=8)
    for length in (5, 2, 6):
        simulation.submit(length, 2)
    assert shape(simulation.step()) == [("r0", 5), ("r1", 2), ("r2", 1)]
    assert shape(simulation.step()) == [("r0", 1), ("r1", 1), ("r2", 5)]


def test_a_budget_below_the_number_of_rows_serves_the_oldest() -> None:
    simulation = Simulation(20, budget=2)
    for _ in range(3):
        simulation.submit(1, 3)
    assert shape(simulation.step()) == [("r0", 1), ("r1", 1)]
    assert shape(simulation.step()) == [("r0", 1), ("r1", 1)]
    assert simulation.drain() < 9
    assert [r.context.current_length for r in simulation.arrivals] == [4, 4, 4]


def test_inputs_of_a_mixed_batch() -> None:
    """A decode row, the last chunk of a prompt, and the first chunk of another."""
    simulation = Simulation(20, budget=10)
    simulation.submit([1, 2], 8)
    simulation.submit(range(20, 33), 4)
    simulation.submit(range(40, 50), 4)
    assert shape(simulation.step()) == [("r0", 2), ("r1", 8)]
    batch = simulation.step()
    assert batch is not None
    assert batch.inputs.tokens.tolist() == [next_token([1, 2]), *range(28, 33), *range(40, 44)]
    assert batch.inputs.input_row_offsets.tolist() == [0, 1, 6, 10]
    assert batch.inputs.logits_indices.tolist() == [0, 5]
    assert ids(batch.sampled) == ["r0", "r1"]


# -- the end of a request


def test_a_stop_token_ends_a_request_and_the_limit_another() -> None:
    simulation = Simulation(8)
    first = next_token([1, 1])
    stopped = simulation.submit(2, 6, stops=[first])
    limited = simulation.submit(2, 3, stops=[ALPHABET])
    simulation.drain()
    assert (stopped.finish_reason, limited.finish_reason) == ("stop", "length")
    assert stopped.context.tokens.tolist() == [1, 1, first]
    assert limited.context.current_length == 5


def test_a_stop_token_that_comes_last_is_a_stop() -> None:
    simulation = Simulation(8)
    request = simulation.submit(2, 1, stops=[next_token([1, 1])])
    simulation.drain()
    assert request.finish_reason == "stop"


# -- preemption


def test_the_newest_are_preempted_and_recomputed() -> None:
    """Three rows of two full pages each outgrow six pages at the same step."""
    simulation = Simulation(6, budget=24)
    for i in range(3):
        simulation.submit([i] * 8, 8)
    assert shape(simulation.step()) == [("r0", 8), ("r1", 8), ("r2", 8)]
    batch = simulation.step()
    assert shape(batch) == [("r0", 1), ("r1", 1)]
    assert simulation.scheduler.preemptions == 1
    assert ids(simulation.scheduler.waiting) == ["r2"]
    newest = simulation.arrivals[2].context
    assert newest.tokens.tolist() == [2] * 8 + [next_token([2] * 8)], "what it generated is kept"
    assert (newest.processed_length, newest.active_length) == (0, 9)
    simulation.drain()
    for i, request in enumerate(simulation.arrivals):
        assert request.context.tokens[8:].tolist() == expected_output([i] * 8, 8, ())
    assert simulation.idle


def test_several_preempted_keep_their_order() -> None:
    """r2 and r1 make room for r0 in one step, before r3, which came later."""
    simulation = Simulation(6, budget=24)
    simulation.submit([0] * 16, 8)
    simulation.submit([1] * 4, 8)
    simulation.submit([2] * 4, 8)
    simulation.submit([3] * 4, 8)
    assert shape(simulation.step()) == [("r0", 16), ("r1", 4), ("r2", 4)]
    assert shape(simulation.step()) == [("r0", 1)]
    assert ids(simulation.scheduler.waiting) == ["r1", "r2", "r3"]
    assert simulation.scheduler.preemptions == 2
    simulation.drain()
    assert simulation.idle


def test_a_step_that_preempts_admits_nobody() -> None:
    """r2 would fit into the pages that r1 gave back, but r1 comes before it."""
    simulation = Simulation(5, budget=24)
    simulation.submit([0] * 8, 8)
    simulation.submit([1] * 12, 4)
    simulation.submit([2] * 1, 2)
    assert shape(simulation.step()) == [("r0", 8), ("r1", 12)]
    assert shape(simulation.step()) == [("r0", 1)]
    assert ids(simulation.scheduler.running) == ["r0"]


def test_a_preempted_request_is_recomputed_from_the_prefix_cache() -> None:
    simulation = Simulation(6, budget=24, prefix=True)
    for i in range(3):
        simulation.submit([i] * 8, 8)
    simulation.drain()
    assert simulation.scheduler.preemptions > 0
    assert simulation.kv.get_metrics_aggregated().cache_tokens > 0
    for i, request in enumerate(simulation.arrivals):
        assert request.context.tokens[8:].tolist() == expected_output([i] * 8, 8, ())


def test_sampling_draws_one_number_for_each_token_even_if_recomputed() -> None:
    """A preempted request must not skip numbers of its seed."""
    simulation = Simulation(6, budget=24)
    for i in range(3):
        simulation.submit([i] * 8, 8)
    sampled: list[str] = []
    while batch := simulation.step():
        sampled += ids(batch.sampled)
    assert simulation.scheduler.preemptions > 0
    assert {name: sampled.count(name) for name in sampled} == {"r0": 8, "r1": 8, "r2": 8}


# -- cancel


def test_cancel_in_every_state() -> None:
    simulation = Simulation(6, budget=9)
    decoding = simulation.submit([0] * 8, 8)
    chunked = simulation.submit([1] * 12, 2)
    waiting = simulation.submit([2] * 8, 2)
    later = simulation.submit([3] * 2, 2)
    assert shape(simulation.step()) == [("r0", 8), ("r1", 1)]
    for request in (chunked, waiting, decoding):
        assert simulation.scheduler.cancel(request.request_id)
        assert not simulation.scheduler.cancel(request.request_id)
        assert not simulation.kv.contains(request.request_id)
    assert simulation.kv.num_free_blocks() == 6
    simulation.drain()
    assert later.finish_reason == "length"
    assert simulation.idle
    assert not simulation.scheduler.cancel(later.request_id), "it has finished"
    assert not simulation.scheduler.cancel("nobody")


def test_cancel_of_a_preempted_request() -> None:
    simulation = Simulation(4, budget=24)
    for i in range(2):
        simulation.submit([i] * 8, 8)
    simulation.step()
    simulation.step()
    assert ids(simulation.scheduler.waiting) == ["r1"]
    assert simulation.scheduler.cancel("r1")
    simulation.drain()
    assert simulation.arrivals[0].finish_reason == "length"
    assert simulation.arrivals[1].finish_reason is None
    assert simulation.idle


# -- caches with windows


def test_a_window_makes_room_for_a_prompt_longer_than_the_pool() -> None:
    """4 pages of 4 tokens; a chunk of 5 tokens and a window of 6 need no more than 4."""
    simulation = Simulation(4, budget=5, windows=[6])
    request = simulation.submit(range(50), 10)
    simulation.drain()
    assert request.context.current_length == 60
    assert simulation.scheduler.preemptions == 0
    assert simulation.idle


def test_the_tightest_cache_of_a_tree_decides() -> None:
    simulation = Simulation(4, budget=5, windows=[6, None])
    message = r"at most 4 pages from the pool of leaf 'leaf1', got 18 tokens .*need 5"
    with pytest.raises(RequestError, match=message):
        simulation.submit(12, 6)
    simulation.submit(12, 5)
    simulation.submit(12, 5)
    simulation.drain()
    assert simulation.idle


# -- the whole of it

submits = st.tuples(
    st.just("submit"),
    st.lists(st.integers(0, 1), min_size=1, max_size=24),
    st.integers(1, 12),
    st.lists(st.integers(0, ALPHABET - 1), max_size=1),
)
actions = st.lists(
    st.one_of(
        submits,
        st.tuples(st.just("step"), st.integers(1, 4)),
        st.tuples(st.just("cancel"), st.integers(0, 11)),
    ),
    min_size=1,
    max_size=24,
)


@example(  # the third is passed by, and admitted when the fourth runs
    actions=[("submit", [0] * length, new, []) for length, new in ((2, 1), (5, 1), (5, 1), (1, 2))],
    pages=4,
    budget=5,
    rows=2,
    prefix=True,
    windows=(None,),
)
@settings(max_examples=400)
@given(
    actions=actions,
    pages=st.integers(3, 9),
    budget=st.sampled_from([1, 2, 5, 16, 64]),
    rows=st.integers(1, 5),
    prefix=st.booleans(),
    windows=st.sampled_from([(None,), (None,), (5,), (None, 5), (9, 2)]),
)
def test_every_request_finishes_with_its_own_tokens(
    actions: list[Any],
    pages: int,
    budget: int,
    rows: int,
    prefix: bool,
    windows: tuple[int | None, ...],
) -> None:
    """Random arrivals, lengths and cancellations over a pool that runs dry all the time.

    The simulation reads each row's context back from its pages in every step, so tokens that are
    skipped, repeated, out of order or of another request fail at once.
    """
    simulation = Simulation(pages, budget=budget, rows=rows, prefix=prefix, windows=windows)
    wanted: dict[str, list[int]] = {}  # all tokens of what was not cancelled
    for kind, *values in actions:
        if kind == "submit":
            prompt, new_tokens, stops = values
            try:
                request = simulation.submit(prompt, new_tokens, stops)
            except RequestError:
                assert len(prompt) + new_tokens - 1 > pages * PAGE
                continue
            wanted[request.request_id] = prompt + expected_output(prompt, new_tokens, stops)
        elif kind == "step":
            for _ in range(values[0]):
                simulation.step()
        else:
            request_id = f"r{values[0]}"
            live = simulation.scheduler.running + list(simulation.scheduler.waiting)
            was_live = request_id in ids(live)
            assert simulation.scheduler.cancel(request_id) == was_live
            if was_live:
                del wanted[request_id]
    simulation.drain()
    assert simulation.idle
    for request in simulation.arrivals:
        tokens = wanted.get(request.request_id)
        if tokens is not None:
            assert request.context.tokens.tolist() == tokens
            stopped = tokens[-1] in request.stop_tokens
            assert request.finish_reason == ("stop" if stopped else "length")
