"""Kills processes that use a disk store, and reads what they leave. Prints JSON.

    python tests/kv/crash_driver.py FOLDER RUNS SEED

A process of its own, without threads or frameworks, so that forking is cheap and safe. A run: two
children write, read, touch, clear and reopen the folder of a third that lives on; each is killed
at a random moment; then every page is read by a fresh store and compared with what its key says.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sys
import time
from hashlib import sha256
from pathlib import Path

from kvgraph.kv.tiers.disk.store import DiskStore

MODEL, OTHER = sha256(b"model").digest(), sha256(b"other").digest()
SIZES = (5000, 12 << 10, 40 << 10)
LIMIT = 40 * (44 << 10)
KEYS = [sha256(f"key {i}".encode()).digest() for i in range(120)]
BYTES = sha256(b"bytes").digest() * (SIZES[-1] // 16)


def page(model: bytes, key: bytes) -> bytes:
    """What a key names: its size and bytes follow from it, and differ by model."""
    size = SIZES[key[0] % len(SIZES)]
    shift = key[1] + (7 if model == MODEL else 0)
    return (model[:8] + key + BYTES[shift:])[:size]


def child(folder: Path, seed: int) -> None:
    """Use the store until killed."""
    rng = random.Random(seed)
    while True:
        model = rng.choice((MODEL, MODEL, MODEL, OTHER))
        store = DiskStore(folder, LIMIT, model, SIZES[-1])
        for _ in range(rng.choice((5, 200))):
            key = rng.choice(KEYS)
            content = page(model, key)
            action = rng.random()
            if action < 0.6:
                store.write(key, [memoryview(content[:100]), memoryview(content[100:])])
            elif action < 0.9:
                out = bytearray(len(content))
                if store.read(key, memoryview(out)) and out != content:
                    os._exit(9)
            elif action < 0.99:
                store.touch([key])
            elif action < 0.995:
                store.flush()
            else:
                store.clear()
        store.close()


def read_all(store: DiskStore, model: bytes) -> tuple[int, int]:
    """Pages served right, and wrong."""
    served = wrong = 0
    for key in KEYS:
        content = page(model, key)
        out = bytearray(len(content))
        if store.read(key, memoryview(out)):
            served += 1
            wrong += out != content
    return served, wrong


def main() -> None:
    folder, runs, seed = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    rng = random.Random(seed)
    lasting = DiskStore(folder, LIMIT, MODEL, SIZES[-1])
    found = {"served": 0, "wrong": 0, "left_early": 0, "damaged": 0, "slowest_open": 0.0}
    for _ in range(runs):
        children = []
        for _ in range(2):
            own_seed = rng.randrange(1 << 30)
            pid = os.fork()
            if not pid:
                child(folder, own_seed)
            children.append(pid)
        for pid in children:
            time.sleep(rng.expovariate(1 / 0.015))
            os.kill(pid, signal.SIGKILL)
            found["left_early"] += os.WTERMSIG(os.waitpid(pid, 0)[1]) != signal.SIGKILL
        start = time.perf_counter()
        fresh = DiskStore(folder, LIMIT, MODEL, SIZES[-1])
        found["slowest_open"] = max(found["slowest_open"], time.perf_counter() - start)
        for store in (fresh, lasting):
            served, wrong = read_all(store, MODEL)
            found["served"] += served
            found["wrong"] += wrong
        found["damaged"] += fresh.stats().damaged
        fresh.close()
    lasting.close()
    found |= refill(folder)
    print(json.dumps(found))
    shutil.rmtree(folder)


def refill(folder: Path) -> dict[str, int]:
    """Whether kills have cost room: pages that fit, and bytes that the folder takes."""
    store = DiskStore(folder, LIMIT, MODEL, SIZES[-1])
    store.clear()
    large = [sha256(f"large {i}".encode()).digest() for i in range(100)]
    for key in large:
        store.write(key, [memoryview(BYTES)[: SIZES[-1]]])
    store.flush()
    held = sum(store.contains(large))
    store.close()
    blocks = sum(path.stat().st_blocks for path in folder.rglob("*.pages"))
    return {"refilled": held, "fits": LIMIT // SIZES[-1], "disk": blocks * 512, "limit": LIMIT}


if __name__ == "__main__":
    main()
