"""Scheduler over a simulated model whose next token depends on every token that it has cached."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvgraph.contract.trees import MultiKVCacheParams
from kvgraph.errors import RequestError
from kvgraph.kv.paged import PagedKVCacheManager
from kvgraph.kv.requests import TextContext
from kvgraph.runtime.sampling import SamplingParams, TokenSource
from kvgraph.runtime.scheduler import Batch, Request, Scheduler
from tests.support.builders import make_params

PAGE = 4
ALPHABET = 5
EMPTY = -1


def next_token(prefix: Sequence[int]) -> int:
    """The simulated model: a function of the whole prefix and nothing else."""
    return zlib.crc32(np.asarray(prefix, np.int32).tobytes()) % ALPHABET


def expected_output(prompt: Sequence[int], new_tokens: int, stops: Sequence[int]) -> list[int]:
    tokens = list(prompt)
    while len(tokens) < len(prompt) + new_tokens:
        tokens.append(next_token(tokens))
        if tokens[-1] in stops:
            break
    return tokens[len(prompt) :]


class Simulation:
    """A scheduler, a checked manager, and pools whose slots hold tokens instead of K and V.

    One pool for each of `windows` (None: full attention).
    """

    def __init__(
        self,
        pages: int,
        *,
        budget: int = 16,
        rows: int = 8,
        prefix: bool = False,
        windows: Sequence[int | None] = (None,),
    ) -> None:
        leaves = {
            f"leaf{i}": make_params(
                page_size=PAGE, enable_prefix_caching=prefix, window_size=window
            )
            for i, window in enumerate(windows)
        }
        single = len(windows) == 1
        self.kv = PagedKVCacheManager(
            leaves["leaf0"] if single else MultiKVCacheParams.from_params(leaves),
            None,
            pages,
            enable_runtime_checks=True,
            max_batch_size=rows,
        )
        self.scheduler = Scheduler(self.kv, rows, budget)
        self.shares = prefix  # then those that wait for a page of another are passed by
        self.windows = windows
        self.pools = [np.full((pages + 1, PAGE), EMPTY) for _ in windows]
        self.arrivals: list[Request] = []

    def submit(
        self,
        prompt: Sequence[int] | int,
        new_tokens: int = 4,
        stops: Sequence[int] = (),
        **identity: Any,
    ) -> Request:
        """Queue `prompt`, or one of that many tokens."""
        tokens = [1] * prompt if isinstance(prompt, int) else list(prompt)
        context = TextContext(f"r{len(self.arrivals)}", tokens, **identity)
        source = TokenSource(SamplingParams())
        request = Request(context, source, frozenset(stops), len(tokens) + new_tokens)
        self.scheduler.submit(request)
        self.arrivals.append(request)
        return request

    def step(self) -> Batch | None:
        """One step of an engine; every property of a batch is asserted on the way."""
        batch = self.scheduler.schedule()
        if batch is None:
            return None
        self.check_order(batch)
        self.check_inputs(batch)
        last_tokens = self.run_model(batch)
        batch.update([last_tokens[row.request_id] for row in batch.sampled])
        self.kv.step(batch.requests)
        self.scheduler.retire()
        return batch

    def drain(self) -> int:
        """Step until nothing is left; the number of steps."""
        steps = 0
        # The oldest request advances by a token in every step, and no oldest is preempted.
        limit = sum(request.max_length for request in self.arrivals)
        while self.step():
            steps += 1
            assert steps <= limit, "a request starves"
        return steps

    def check_order(self, batch: Batch) -> None:
        running, waiting = self.scheduler.running, list(self.scheduler.waiting)
        for queue in (running, waiting) if self.shares else (running + waiting,):
            arrived = [self.arrivals.index(request) for request in queue]
            assert arrived == sorted(arrived), "first come, first served"
        assert batch.rows[0] is running[0], "the oldest runs in every step"
        assert len(running) <= self.scheduler.max_batch_size
        assert all(self.kv.contains(request.request_id) for request in running)
        assert not any(self.kv.contains(request.request_id) for request in waiting)

    def check_inputs(self, batch: Batch) -> None:
        """tokens, offsets and logits_indices say what the contexts say."""
        contexts = [row.context for row in batch.rows]
        inputs = batch.inputs
        for array in (inputs.tokens, inputs.input_row_offsets, inputs.logits_indices):
            assert array.dtype == np.int32
            assert array.ndim == 1
            assert len(array) >= 1
        lengths = [context.active_length for context in contexts]
        assert min(lengths) >= 1
        assert sum(lengths) == len(inputs.tokens) <= self.scheduler.max_batch_tokens
        assert inputs.input_row_offsets.tolist() == np.cumsum([0, *lengths]).tolist()
        assert inputs.tokens.tolist() == [
            token for c in contexts for token in c.tokens[c.processed_length :][: c.active_length]
        ]
        ends = [c.processed_length + c.active_length == c.current_length for c in contexts]
        sampled = [row for row, end in zip(batch.rows, ends, strict=True) if end]
        assert batch.sampled == sampled
        last = [
            int(stop) - 1
            for stop, end in zip(inputs.input_row_offsets[1:], ends, strict=True)
            if end
        ]
        assert inputs.logits_indices.tolist() == (last or [0])

    def run_model(self, batch: Batch) -> dict[str, int]:
        """Store the new tokens, read each context back from its pages; next tokens by id."""
        (record,) = self.kv.runtime_inputs(batch.requests).inputs
        records = list(getattr(record, "children", {"": record}).values())
        for leaf, pool, window in zip(records, self.pools, self.windows, strict=True):
            self.run_leaf(batch, leaf, pool, window)
        return {
            row.request_id: next_token(row.context.tokens[: c.processed_length + c.active_length])
            for row, c in ((row, row.context) for row in batch.rows)
        }

    def run_leaf(self, batch: Batch, leaf: Any, pool: Any, window: int | None) -> None:
        """Every token that the new ones see is where the lookup table says."""
        cached, table = np.asarray(leaf.cache_lengths), np.asarray(leaf.lookup_table)
        offsets = batch.inputs.input_row_offsets
        for b, row in enumerate(batch.rows):
            assert cached[b] == row.context.processed_length
            new = batch.inputs.tokens[offsets[b] : offsets[b + 1]]
            for position, token in enumerate(new, int(cached[b])):
                pool[table[b, position // PAGE], position % PAGE] = token
        for b, row in enumerate(batch.rows):
            processed = row.context.processed_length
            length = processed + row.context.active_length
            first = 0 if window is None else max(0, processed - window + 1)
            seen = pool[table[b]].reshape(-1)[first:length]
            assert seen.tolist() == row.context.tokens[first:length].tolist()

    @property
    def idle(self) -> bool:
        """Nothing is queued and every page is back."""
        queued = bool(self.scheduler.running or self.scheduler.waiting)
        return not queued and self.kv.num_free_blocks() == self.kv.total_num_blocks()


def ids(requests: Any) -> list[str]:
    return [request.request_id for request in requests]


def shape(batch: Batch | None) -> list[tuple[str, int]]:
    """Rows of a batch with their new tokens, read from the offsets."""
    assert batch is not None
    lengths = np.diff(batch.inputs.input_row_offsets)
    return [(row.request_id, int(n)) for row, n in zip(batch.rows, lengths, strict=True)]


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


# -- equal prompts that start together


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


@settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow])
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
