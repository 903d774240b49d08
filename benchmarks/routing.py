"""Which replica a prompt goes to: cached tokens by policy, and what the index costs.

    python -m benchmarks.routing [--json]         (make bench-routing)

Method: managers without a model, each with a pool, stand for replicas. Conversations of 5 turns
arrive in a random order, one request at a time; each turn's prompt is the one before it and 64 more
tokens. "one pool" has the pages of all replicas together: the bound. "index" is `RoutingIndex`, fed
by the events of the pools; "least loaded" takes turns; "by chance" draws. With "tight" pools the
conversations hold three times the pages that there are. Reference check: after each run the index
holds exactly the pages of the pools.

Then the index alone: a table of `pages` digests over `replicas` replicas, prompts of 4,096 tokens
of which 3,072 are known. The limit is the time that Python takes to look as many keys up.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from kvgraph.contract.params import KVCacheParams
from kvgraph.kv.paged import PagedKVCacheManager
from kvgraph.kv.pool.journal import PageRemoved, PageStored
from kvgraph.kv.requests import TextContext
from kvgraph.runtime.stats import EngineStats
from kvgraph.serve.facts import EngineFacts
from kvgraph.serve.load import Load
from kvgraph.serve.replicas.index import RoutingIndex
from kvgraph.serve.replicas.report import Report, packed, unpacked

PAGE, NEW, TURNS, CONVERSATIONS = 16, 64, 5, 200
PARAMS = KVCacheParams(
    "float32", n_kv_heads=1, head_dim=1, num_layers=1, page_size=PAGE, enable_prefix_caching=True
)
NEEDED = CONVERSATIONS * NEW * TURNS // PAGE
"""Pages of all conversations."""


class Replica:
    """A pool without a model."""

    def __init__(self, name: str, pages: int) -> None:
        self.name, self.pages = name, pages
        self.kv = PagedKVCacheManager(PARAMS, None, pages, max_batch_size=1)
        self.kv.follow()
        self.kv.events()
        self.sequence = 1
        self.hits = 0

    def run(self, request: str, prompt: list[int]) -> Report:
        """Compute a prompt, and report what it changed."""
        context = TextContext(request, prompt)
        self.kv.claim(request, 0)
        self.kv.alloc(context, 0)
        self.hits += context.cached_prefix_length
        self.kv.runtime_inputs([[context]])
        context.update(1)
        self.kv.step([[context]])
        self.kv.release(request, 0)
        changes = {
            event.digest: isinstance(event, PageStored)
            for event in self.kv.events()
            if isinstance(event, PageStored | PageRemoved)
        }
        added = [digest for digest, held in changes.items() if held]
        removed = [digest for digest, held in changes.items() if not held]
        self.sequence += 1
        return self.report(added, removed, (request,))

    def report(
        self,
        added: Sequence[bytes] = (),
        removed: Sequence[bytes] = (),
        started: tuple[str, ...] = (),
    ) -> Report:
        facts = facts_of(self.pages) if self.sequence == 1 else None
        return Report(
            self.name,
            b"epoch",
            self.sequence,
            facts is not None,
            packed(added),
            packed(removed),
            started,
            Load(EngineStats(0, 0, 0, 0, 0, 0)),
            facts,
        )


def facts_of(pages: int) -> EngineFacts:
    return EngineFacts(1 << 15, 1 << 15, 64, 512, PAGE, True, pages, routed_pages=pages)


def conversations(shared: int, seed: int = 0) -> list[list[int]]:
    """Prompts in the order of their arrival."""
    drawn = random.Random(seed)
    front = [drawn.randrange(1 << 15) for _ in range(shared)]
    texts = [
        [*front, *(drawn.randrange(1 << 15) for _ in range(TURNS * NEW))]
        for _ in range(CONVERSATIONS)
    ]
    left = [i for i in range(CONVERSATIONS) for _ in range(TURNS)]
    drawn.shuffle(left)
    lengths = [shared] * CONVERSATIONS
    prompts = []
    for i in left:
        lengths[i] += NEW
        prompts.append(texts[i][: lengths[i]])
    return prompts


Policy = Callable[[str, list[str], bytes, int], str]


def hit_tokens(prompts: list[list[int]], count: int, pages: int, policy: str) -> int:
    """Cached tokens of all prompts over `count` replicas of `pages` pages."""
    index = RoutingIndex()
    replicas = {f"r{i}": Replica(f"r{i}", pages) for i in range(count)}
    for one in replicas.values():
        assert index.report(one.report()) is not None
    drawn, names = random.Random(1), list(replicas)
    for number, prompt in enumerate(prompts):
        request = f"q{number}"
        if policy == "by chance":
            name = drawn.choice(names)
        elif policy == "least loaded":
            name = names[number % count]
        else:
            digests = replicas["r0"].kv.page_identities(TextContext(request, prompt))
            name = index.choose(request, names, packed(digests), len(prompt))[0]
        assert index.report(replicas[name].run(request, prompt)) is not None
    for name, one in replicas.items():
        held = sorted(unpacked(packed(one.kv.committed_digests())))
        assert sorted(index.pages(name)) == held, f"the index differs from {name}'s pool"
    return sum([one.hits for one in replicas.values()])


def policies() -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    cases = [("roomy", 0, 1.05), ("tight", 0, 1 / 3), ("tight, shared start", 256, 1 / 3)]
    for case, shared, room in cases:
        prompts = conversations(shared)
        for count in (2, 4, 8):
            pages = int(NEEDED * room / count)
            row: dict[str, object] = {"pools": case, "replicas": count}
            row["one pool"] = hit_tokens(prompts, 1, pages * count, "by chance")
            for policy in ("index", "least loaded", "by chance"):
                row[policy] = hit_tokens(prompts, count, pages, policy)
            rows.append(row)
    return rows


def index_costs(replicas: int, pages: int) -> dict[str, object]:
    """Of an index that holds `pages` digests, each on one replica."""
    index = RoutingIndex()
    numbers = np.random.default_rng(0).integers(0, 1 << 63, pages, np.uint64)
    each = pages // replicas
    report = Replica("r0", 1).report()
    start = time.perf_counter()
    for i in range(replicas):
        own = numbers[i * each : (i + 1) * each].tobytes()
        facts = facts_of(each)
        whole = replace(report, replica=f"r{i}", added=own, facts=facts)
        assert index.report(whole) is not None
    filled = time.perf_counter() - start
    names = [f"r{i}" for i in range(replicas)]
    drawn = random.Random(0)
    times, floor = [], []
    table, count = index._table, 3072 // PAGE
    for number in range(200):
        at = drawn.randrange(replicas) * each + drawn.randrange(each - count)
        known = numbers[at : at + count].tobytes()
        chain = known + np.arange(64, dtype=np.uint64).tobytes()
        start = time.perf_counter()
        index.choose(f"q{number}", names, chain, 4096)
        times.append(time.perf_counter() - start)
        keys = unpacked(chain)
        start = time.perf_counter()
        for key in keys:
            table.get(key)
        floor.append(time.perf_counter() - start)
    return {
        "replicas": replicas,
        "pages": pages,
        "MiB": round(index.nbytes / 2**20, 1),
        "bytes a page": round(index.nbytes / pages),
        "pages/s of reports": round(pages / filled),
        "choose us": round(statistics.median(times) * 1e6, 1),
        "look-ups us": round(statistics.median(floor) * 1e6, 1),
    }


def digest_seconds() -> float:
    """Digests of a prompt of 4,096 tokens, in microseconds."""
    kv, prompt = Replica("r", 1).kv, list(range(4096))
    times = []
    for number in range(100):
        context = TextContext(f"d{number}", prompt)
        start = time.perf_counter()
        kv.page_identities(context)
        times.append(time.perf_counter() - start)
    return round(statistics.median(times) * 1e6, 1)


def table(rows: list[dict[str, object]]) -> None:
    lines = [list(rows[0]), *([_cell(value) for value in row.values()] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        print("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)))
    print()


def _cell(value: object) -> str:
    return f"{value:,}" if isinstance(value, int | float) else str(value)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.routing")
    parser.add_argument("--json", action="store_true")
    wanted = parser.parse_args()
    routed = policies()
    for row in routed:
        best, chance, ours = (int(str(row[k])) for k in ("one pool", "by chance", "index"))
        row["of the bound"] = round(ours / best, 3)
        row["over chance"] = round(ours / chance, 2) if chance else "-"
    costs = [index_costs(*size) for size in ((8, 10**5), (64, 10**5), (8, 10**6), (64, 10**6))]
    digests = digest_seconds()
    if wanted.json:
        print(json.dumps({"cached tokens": routed, "index": costs, "digests_us": digests}))
        return
    print("cached tokens")
    table(routed)
    print("the index")
    table(costs)
    print(f"digests of 4,096 tokens: {digests} us")


if __name__ == "__main__":
    main()
