"""Decode steps at the ends of pages: `python -m benchmarks.page_ends [ARTIFACT]`.

Method: ROWS requests of one length decode on a new pool, so that all of them take a page in the
same step, twice in turn: with the memory of the next pages touched ahead of time, and without (the
baseline). ARTIFACT: default a Llama of 246M parameters in float32 with random weights, compiled
here (pages of 4 MiB). Reference check: both give the same tokens. Limit: the system's own time for
the first touch of as much memory as a page of every row has, in one piece; a virtual machine may
take twenty times as long as a machine that has the memory already.
"""

from __future__ import annotations

import contextlib
import sys
import time
from pathlib import Path

import numpy as np

import kvgraph
from benchmarks.step import built, without_touch

ROWS, PROMPT, PAGES = 32, 64, 3
START = 8
"""First steps, which compute the prompts."""


def decode(artifact: Path, *, ahead: bool) -> tuple[np.ndarray, list[int], int]:
    """Milliseconds of each decode step, all tokens, and bytes of a page."""
    with kvgraph.Engine(artifact, num_pages=ROWS * (PAGES + 2), max_batch_size=ROWS) as engine:
        if not ahead:
            without_touch(engine)
        params = engine.artifact.params()
        steps = PAGES * params.page_size
        sampling = kvgraph.SamplingParams(max_new_tokens=steps + START, ignore_eos=True)
        rng = np.random.default_rng(0)
        for prompt in rng.integers(3, 900, (ROWS, PROMPT)).tolist():
            engine.submit(prompt, sampling)
        times, tokens = [], []
        for _ in range(steps):
            start = time.perf_counter()
            tokens += [token.token_id for token in engine.step()]
            times.append((time.perf_counter() - start) * 1e3)
        return np.array(times[START:]), tokens, params.bytes_per_page


def main() -> None:
    with contextlib.ExitStack() as stack:
        folder = Path(sys.argv[1]) if len(sys.argv) > 1 else stack.enter_context(built())
        all_tokens = []
        for ahead in (False, True, False, True):
            times, tokens, page = decode(folder, ahead=ahead)
            all_tokens.append(tokens)
            name = "touched ahead" if ahead else "baseline: touched in the step"
            median, high, most = np.percentile(times, (50, 99, 100))
            print(f"{name:30} median {median:6.1f} ms   99 % {high:6.1f}   most {most:6.1f}")
        assert all(tokens == all_tokens[0] for tokens in all_tokens)
        fresh = np.zeros(ROWS * page, np.uint8)
        start = time.perf_counter()
        fresh[::4096] = 1
        limit = (time.perf_counter() - start) * 1e3
        print(f"{ROWS} pages of {page >> 10} KiB are touched in {limit:.1f} ms")


if __name__ == "__main__":
    main()
