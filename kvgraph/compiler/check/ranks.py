"""Run the programs of all ranks together on this machine, one thread for each rank."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from kvgraph.compiler.check.compare import Logits, Tokens
from kvgraph.compiler.check.host import Params, logits_of
from kvgraph.compiler.interpret import ProgramRun
from kvgraph.compiler.pipeline import trace_ranks
from kvgraph.compiler.traced import Traced
from kvgraph.contract.devices import Device
from kvgraph.contract.threads import start_all
from kvgraph.contract.trees import MultiKVCacheParams
from kvgraph.errors import CapacityError
from kvgraph.ops.group import Group, shared_bytes

TIMEOUT = 600.0
"""Most seconds that a rank waits for another. It is long because operators run one by one."""


def rank_logits(
    traced: Traced,
    ranks: int,
    kind: str,
    rewrite: Callable[[Traced], None],
    rows: Sequence[Tokens],
    chunk: int,
) -> list[Logits]:
    """Logits of rank 0 while all ranks run together; one `[len(row), vocab]` array for each row.

    `rewrite`: runs the passes of a target, for devices of `kind`, on one rank's trace.
    """
    memory = np.zeros(shared_bytes(ranks), np.uint8)
    groups = [Group(memory, rank, ranks, [-1] * ranks, TIMEOUT) for rank in range(ranks)]
    runs = []
    for own in trace_ranks(traced, kind, ranks, functional=False):
        rewrite(own)
        runs.append((own, ProgramRun(own.program, weights=own.weights)))
    found: list[list[Logits]] = [[] for _ in runs]
    failed: list[BaseException] = []

    def run(rank: int) -> None:
        own, step = runs[rank]
        groups[rank].enter()
        try:
            params = _of_one_rank(own.plan.params)
            found[rank] = logits_of(step, own.signature, params, rows, chunk=chunk)
        except BaseException as error:
            failed.append(error)
            groups[rank].abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(ranks)]
    try:
        start_all(threads)
    except CapacityError as error:
        failed.append(error)
        groups[0].abort()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]
    return found[0]


def _of_one_rank(params: Params) -> Params:
    """Parameters of one rank's part of the cache, as those of an unsharded cache."""
    if isinstance(params, MultiKVCacheParams):
        return MultiKVCacheParams.from_params({n: _of_one_rank(c) for n, c in params.children})
    return replace(params, n_kv_heads=params.n_kv_heads_per_device, devices=(Device("cpu"),))
