"""What tiers cost and give: `make bench-tiers`, or `python -m benchmarks.tiers [--smoke]`.

1. Bandwidth of the host and the disk tier through the connector, its threads and queues included,
   each way, for pages of 4 MiB. Limits, measured in turns with it: a memcpy between two warm
   arrays for the host; one file of the same folder, pread and pwrite of the same sizes, for the
   disk (both go through the system's page cache, without fsync). Every byte is compared.
2. Time to the first token behind a 2000-token prefix: cold, and from each tier with the device
   emptied between the runs. Checked: the tokens equal the cold run's.
3. Step time with offloading on and off: engines in turns over the same requests (prefill and
   decode). Besides the time, the processor time of the thread that steps (which computes, too): of
   each step the least in any turn, since neighbours on a machine disturb more than tiers do.
   Checked: the same tokens.

The model is a random llama of 8 layers of 512 (pages of 128
tokens, 4 MiB), one thread. Medians of several turns, and the spread. A server for the remote tier
is started where one is installed.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

import kvgraph
from kvgraph import Engine, SamplingParams
from kvgraph.contract.devices import HOST
from kvgraph.contract.inputs import Buffer
from kvgraph.kv.tiers.connector import Move, Transfer
from kvgraph.kv.tiers.copies import HostCopier
from kvgraph.kv.tiers.disk.store import DiskStore
from kvgraph.kv.tiers.host import HostStore
from kvgraph.kv.tiers.leaf_pools import LeafPools
from kvgraph.kv.tiers.tiered import TieredConnector
from kvgraph.runtime.artifact import Artifact
from kvgraph.runtime.prefix import write_prefix
from tests.support.models import make_model

PAGE_BYTES = 4 << 20
PREFIX = 2000
HOST_PAGES = 40
"""So few that each turn reuses memory: the first touch of memory is the system's cost."""

WIDE = {
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "vocab_size": 2048,
    "max_position_embeddings": 4096,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--smoke", action="store_true", help="few turns over a small model")
    smoke = parser.parse_args().smoke
    with tempfile.TemporaryDirectory() as folder:
        bandwidth(Path(folder), turns=2 if smoke else 9, pages=8 if smoke else 48)
        artifact = make_artifact(Path(folder), smoke)
        first_token(artifact, Path(folder), turns=2 if smoke else 5)
        step_time(artifact, Path(folder), turns=2 if smoke else 7)


def make_artifact(folder: Path, smoke: bool) -> Artifact:
    overrides = WIDE | ({"num_hidden_layers": 1} if smoke else {})
    model = make_model("llama", folder / "model", **overrides)
    kvgraph.compile(model, folder / "model.kvg", page_size=128)
    return kvgraph.load(folder / "model.kvg")


# -- bandwidth


def bandwidth(folder: Path, turns: int, pages: int) -> None:
    print(f"bandwidth, GB/s ({pages} pages of {PAGE_BYTES >> 20} MiB, median of {turns}, spread)")
    pool = np.random.default_rng(0).integers(0, 255, (pages, PAGE_BYTES), np.uint8)
    other = np.zeros_like(pool)
    pools, target = pools_of(pool), pools_of(other)
    slab = np.zeros(pages * PAGE_BYTES, np.uint8)
    host = HostStore({PAGE_BYTES: pages}, {PAGE_BYTES: 0}, lambda nbytes: slab[:nbytes])
    connector = connect(host, pages)
    warm = np.zeros_like(pool)
    copy_in, copy_out, memcpy = [], [], []
    for _ in range(turns):
        connector.reset()
        copy_out.append(offload(connector, pools, pages))
        other[:] = 0
        copy_in.append(load(connector, target, pages))
        assert np.array_equal(other, pool)
        memcpy.append(seconds(lambda: [np.copyto(warm[i], pool[i]) for i in range(pages)]))
    connector.close()
    report("device to host", copy_out, "memcpy", memcpy, pages, goal=80)
    report("host to device", copy_in, "memcpy", memcpy, pages, goal=80)
    disk_bandwidth(folder, turns, pages, pool, other)


def disk_bandwidth(folder: Path, turns: int, pages: int, pool: Any, other: Any) -> None:
    """The store itself, then through the connector with its host copies."""
    pools, target = pools_of(pool), pools_of(other)
    wrote, read, through, raw_wrote, raw_read = [], [], [], [], []
    for turn in range(turns):
        store = DiskStore(folder / f"disk{turn}", 2 * pool.nbytes, b"f" * 32, PAGE_BYTES)
        keys = [move.key for move in moves(pools, pages)]
        raw_wrote.append(seconds(lambda: raw(folder / "raw", pool, os.O_CREAT | os.O_WRONLY)))
        wrote.append(seconds(partial(write_all, store, keys, pool)))
        raw_read.append(seconds(lambda: raw(folder / "raw", other, os.O_RDONLY)))
        assert np.array_equal(other, pool)
        other[:] = 0
        read.append(seconds(partial(read_all, store, keys, other)))
        assert np.array_equal(other, pool)
        other[:] = 0
        host = HostStore({PAGE_BYTES: 0}, {PAGE_BYTES: 4}, lambda n: np.zeros(n, np.uint8))
        connector = connect(host, pages, [store])
        through.append(load(connector, target, pages))
        assert np.array_equal(other, pool)
        connector.close()
        (folder / "raw").unlink()
        shutil.rmtree(folder / f"disk{turn}")
    report("disk, write", wrote, "pwrite", raw_wrote, pages, goal=70)
    report("disk, read", read, "pread", raw_read, pages, goal=70)
    report("disk to device", through, "pread", raw_read, pages)


def write_all(store: DiskStore, keys: list[bytes], pool: Any) -> None:
    for key, page in zip(keys, pool, strict=True):
        assert store.write(key, [page.data])
    store.flush()


def read_all(store: DiskStore, keys: list[bytes], pool: Any) -> None:
    for key, page in zip(keys, pool, strict=True):
        assert store.read(key, page.data)


def raw(path: Path, pool: Any, flags: int) -> None:
    file = os.open(path, flags)
    for at, page in enumerate(pool):
        if flags & os.O_WRONLY:
            os.pwrite(file, page, at * PAGE_BYTES)
        else:
            os.preadv(file, [page], at * PAGE_BYTES)
    os.close(file)


def pools_of(pool: Any) -> LeafPools:
    return LeafPools("", "0-1/1", (Buffer("int8", pool.shape, HOST, pool),), HostCopier())


def connect(host: HostStore, pages: int, stores: Sequence[Any] = ()) -> TieredConnector:
    return TieredConnector(host, stores, largest=PAGE_BYTES, max_offloads=pages, max_writes=pages)


def moves(pools: LeafPools, pages: int) -> list[Move]:
    return [Move(page.to_bytes(32, "little"), pools, page) for page in range(pages)]


def offload(connector: TieredConnector, pools: LeafPools, pages: int) -> float:
    def run() -> None:
        assert len(connector.offload(moves(pools, pages))) == pages
        assert sum(len(transfer.moves) for transfer in wait(connector, pages)) == pages

    return seconds(run)


def load(connector: TieredConnector, pools: LeafPools, pages: int) -> float:
    def run() -> None:
        transfer = connector.load(moves(pools, pages))
        wait(connector, pages)
        assert transfer.ok

    return seconds(run)


def wait(connector: TieredConnector, count: int) -> list[Transfer]:
    ended: list[Transfer] = []
    while sum(len(transfer.moves) for transfer in ended) < count:
        connector.wait(60)
        ended += connector.poll()
    return ended


def seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def report(
    name: str,
    ours: list[float],
    limit: str,
    theirs: list[float],
    pages: int,
    goal: int | None = None,
) -> None:
    """Of the medians, and of the best turns: a busy machine disturbs these less."""
    nbytes = pages * PAGE_BYTES
    mine, best = (nbytes / pick / 1e9 for pick in (statistics.median(ours), min(ours)))
    theirs_mine, theirs_best = (
        nbytes / pick / 1e9 for pick in (statistics.median(theirs), min(theirs))
    )
    print(
        f"  {name:15} {mine:6.2f}, {100 * mine / theirs_mine:3.0f} % of {limit} {theirs_mine:.2f}; "
        f"best {best:6.2f}, {100 * best / theirs_best:3.0f} % of {theirs_best:.2f}"
        + f"; goal {goal} %"
        * bool(goal)
    )


# -- time to first token


def first_token(artifact: Artifact, folder: Path, turns: int) -> None:
    tokens = np.random.default_rng(1).integers(3, 2048, PREFIX).tolist()
    prompt = [*tokens, 7, 8, 9]
    print(f"time to first token behind {PREFIX} tokens, ms (median of {turns}, spread)")
    size = PREFIX // 128 + 4
    plain = Engine(artifact, num_pages=size, num_threads=1)
    cold = [first(plain, prompt) for _ in range(turns)]
    show("cold", cold, cold)
    wanted = cold[0][1]
    kvp = folder / "system.kvp"
    write_prefix(plain, tokens, kvp)
    with contextlib.ExitStack() as stack:
        tiers: dict[str, dict[str, Any]] = {
            "host": {"total_num_host_pages": 40},
            "disk": {"disk": folder / "tier"},
            "precomputed": {"prefixes": [kvp]},
        }
        url = stack.enter_context(server(folder))
        if url:
            tiers["remote"] = {"remote": url}
        else:
            print("  remote: not measured, no redis-server or valkey-server is installed")
        for name, options in tiers.items():
            with Engine(artifact, num_pages=size, num_threads=1, **options) as engine:
                if name != "precomputed":
                    first(engine, prompt)
                hits = [first(engine, prompt) for _ in range(turns)]
                assert all(token == wanted for _, token in hits)
                kv: Any = engine.kv
                assert kv.get_metrics_aggregated().cache_tokens >= turns * (PREFIX // 128) * 128
                show(name, hits, cold)


def first(engine: Engine, prompt: list[int]) -> tuple[float, int]:
    """Seconds to the first token with nothing cached on the device, and the token."""
    kv: Any = engine.kv
    while kv.get_metrics_aggregated().inflight_ops:
        time.sleep(0.01)
    kv.poll()
    for replica in kv._replicas:
        replica.reset_prefix_cache()
    start = time.perf_counter()
    done = engine.generate([prompt], SamplingParams(max_new_tokens=1, ignore_eos=True))[0]
    return time.perf_counter() - start, done.token_ids[0]


def show(name: str, hits: list[tuple[float, int]], cold: list[tuple[float, int]]) -> None:
    ours, base = [t * 1e3 for t, _ in hits], statistics.median(t for t, _ in cold) * 1e3
    median = statistics.median(ours)
    spread = f"({min(ours):.1f}-{max(ours):.1f})"
    print(f"  {name:12} {median:8.1f} {spread}  {100 * median / base:.1f} % of cold")


@contextlib.contextmanager
def server(folder: Path) -> Iterator[str | None]:
    binary = shutil.which("valkey-server") or shutil.which("redis-server")
    if binary is None:
        yield None
        return
    socket = folder / "server.sock"
    process = subprocess.Popen(
        [binary, "--port", "0", "--unixsocket", str(socket), "--save", "", "--dir", str(folder)],
        stdout=subprocess.DEVNULL,
    )
    try:
        while not socket.exists():
            time.sleep(0.05)
        yield f"unix://{socket}"
    finally:
        process.terminate()
        process.wait()


# -- steps with offloading on and off


def step_time(artifact: Artifact, folder: Path, turns: int) -> None:
    random = np.random.default_rng(2)
    print(f"engine steps, ms (median of {turns} turns, spread; goal for the processor time: +3 %)")
    tiers = {
        "off": {},
        "host": {"total_num_host_pages": HOST_PAGES},
        "host and disk": {"total_num_host_pages": HOST_PAGES, "disk": folder / "steps"},
    }
    engines = {
        name: Engine(artifact, num_pages=100, num_threads=1, **options)
        for name, options in tiers.items()
    }
    walls: dict[str, list[list[float]]] = {name: [] for name in tiers}
    works: dict[str, list[list[float]]] = {name: [] for name in tiers}
    for _ in range(turns + 2):
        prompts = random.integers(3, 2048, (8, 500)).tolist()
        answers = set()
        for name, engine in engines.items():
            wall, work, tokens = serve(engine, prompts)
            walls[name].append(wall)
            works[name].append(work)
            answers.add(tokens)
        assert len(answers) == 1
    for name, engine in engines.items():
        kv: Any = engine.kv
        print(f"  {name}: {kv.get_metrics_aggregated().d2h_blocks_copied} pages offloaded")
        engine.close()
    for kind, part in (("prefill", slice(0, 2)), ("decode", slice(3, None))):
        base = undisturbed(works["off"], part)
        for name in tiers:
            means = [1e3 * statistics.mean(taken[part]) for taken in walls[name][2:]]
            mine = undisturbed(works[name], part)
            print(
                f"  {kind:8} {name:14} {statistics.median(means):8.2f} "
                f"({min(means):.2f}-{max(means):.2f}); processor time {1e3 * mine:8.2f}, "
                f"{100 * (mine / base - 1):+.1f} %"
            )


def undisturbed(turns: list[list[float]], part: slice) -> float:
    """Mean over the steps of a turn of the least that each took in any turn but the first two."""
    return statistics.mean([min(times) for times in zip(*turns[2:], strict=True)][part])


def serve(
    engine: Engine, prompts: list[list[int]]
) -> tuple[list[float], list[float], tuple[Any, ...]]:
    """Seconds of each step (two of prefill, then decode), and of its thread; all tokens."""
    for prompt in prompts:
        engine.submit(prompt, SamplingParams(max_new_tokens=140, ignore_eos=True))
    walls, works, tokens = [], [], []
    while engine.busy:
        start, work = time.perf_counter(), time.thread_time()
        tokens += [(token.request_id, token.token_id) for token in engine.step()]
        walls.append(time.perf_counter() - start)
        works.append(time.thread_time() - work)
    tokens.sort(key=lambda token: token[0])  # in the order of each request
    return walls, works, tuple(tokens)


if __name__ == "__main__":
    main()
