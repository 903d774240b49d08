"""A scheduler and a checked manager over a model whose next token depends on all before it."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from kvgraph.contract.trees import MultiKVCacheParams
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
        self.scheduler.require_room(request)
        self.scheduler.enqueue(request)
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
        tokens = [last_tokens[row.request_id] for row in batch.sampled]
        pairs = zip(batch.sampled, tokens, strict=True)
        batch.update(tokens, [row.reason_after(token) for row, token in pairs], {})
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
        # One that was passed by, and is admitted now, stands behind younger ones in the batch.
        firsts = batch.rows if self.shares else batch.rows[:1]
        assert running[0] in firsts, "the oldest runs in every step"
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
