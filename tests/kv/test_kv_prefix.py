"""The prefix cache: what is hit, committed, evicted and told apart."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from hashlib import sha256
from typing import Any

import numpy as np
import pytest

from kvgraph.contract.trees import MultiKVCacheParams
from kvgraph.kv.metrics import KVCacheMetrics
from kvgraph.kv.paged import PagedKVCacheManager
from kvgraph.kv.pool.identity import chain, chain_root
from kvgraph.kv.pool.lookup import deepest_window, longest_run
from kvgraph.kv.requests import TextContext
from tests.support.builders import decode, make_manager, make_params, start


def make_cached(pages: int = 10, **changes: Any) -> PagedKVCacheManager:
    return make_manager(pages, enable_prefix_caching=True, **changes)


def serve(manager: PagedKVCacheManager, name: str, tokens: Any, **changes: Any) -> list[int]:
    """A whole request: prefill, one token, release; the pages that it had."""
    ctx = start(manager, name, tokens, **changes)
    ctx.update(1)
    manager.step([ctx])
    pages = manager.get_req_blocks(name)
    manager.release(name)
    return pages


def test_a_hit_leaves_a_token_to_compute() -> None:
    manager = make_cached()
    serve(manager, "a", range(8))
    hits = {}
    for length in (4, 5, 8, 9, 12):
        ctx = start(manager, f"b{length}", range(length))
        hits[length] = ctx.cached_prefix_length
        assert ctx.processed_length == ctx.cached_prefix_length == length - ctx.active_length
        manager.release(f"b{length}")
    assert hits == {4: 0, 5: 4, 8: 4, 9: 8, 12: 8}


def test_the_last_token_is_never_hashed() -> None:
    manager = make_cached()
    ctx = start(manager, "a", range(8))
    ctx.active_length = 8
    ctx.update()
    manager.step([ctx])
    assert start(manager, "b", range(12)).cached_prefix_length == 4
    assert len(manager.page_identities(TextContext("c", range(8)))) == 1


def test_identities_follow_what_they_are_made_of() -> None:
    """A request keeps those that were computed, for as long as they are its own."""
    seeds = {"hash_seed": b"s" * 32}
    managers = [make_cached(), make_cached(**seeds), make_cached(page_size=2)]
    ctx = TextContext("a", range(9))

    def fresh(manager: PagedKVCacheManager) -> list[bytes]:
        own = {"cache_salt": ctx.cache_salt, "adapter": ctx.adapter, "is_private": ctx.is_private}
        return manager.page_identities(TextContext("a", ctx.tokens, **own))

    def require_own() -> list[bytes]:
        for manager in managers:
            assert manager.page_identities(ctx) == fresh(manager)
            assert manager.page_identities(copy.deepcopy(ctx)) == fresh(manager)
        return managers[0].page_identities(ctx)

    first = require_own()
    first.append(b"of the caller")
    ctx.update(5)
    for token in range(8):
        ctx.update(token)
    assert require_own()[:2] == first[:2]
    assert len(require_own()) == 4
    ctx.cache_salt = b"x"
    salted = require_own()
    ctx.adapter = "y"
    assert not set(require_own()) & {*salted, *first}
    ctx.is_private = True
    assert require_own() == []


def test_metrics_count_prefill_once() -> None:
    manager = make_cached()
    serve(manager, "a", range(9))
    ctx = TextContext("b", range(15))
    manager.claim("b")
    for _ in range(2):
        manager.alloc(ctx)
    decode(manager, ctx, 1, 2, 3)
    metrics = manager.get_metrics_aggregated()
    assert metrics == KVCacheMetrics(input_tokens=9 + 7, cache_tokens=8, device_blocks_served=2)
    assert metrics.cache_hit_rate == 8 / 24
    manager.reset_metrics()
    assert manager.get_metrics_aggregated() == KVCacheMetrics()


def test_generated_tokens_are_hit_too() -> None:
    manager = make_cached()
    ctx = start(manager, "a", range(6))
    decode(manager, ctx, 10, 11, 12, 13)
    follow_up = start(manager, "b", [*ctx.tokens, 20])
    assert follow_up.cached_prefix_length == 8
    assert manager.get_req_blocks("b")[:2] == manager.get_req_blocks("a")[:2]


def test_equal_content_is_held_once() -> None:
    manager = make_cached()
    a, b = start(manager, "a", range(9)), start(manager, "b", range(9))
    assert manager.get_req_blocks("b") == [3, 4, 5]
    for ctx in (a, b):
        ctx.update(1)
    manager.step([[a, b]])
    assert manager.get_req_blocks("b") == [0, 1, 5]
    assert manager.num_free_blocks() == 6
    inputs = manager.runtime_inputs([[a, b]]).inputs[0]
    assert np.asarray(inputs.lookup_table).tolist() == [[0, 1, 2], [0, 1, 5]]


def test_hits_are_not_evicted_by_the_growth_of_the_same_batch() -> None:
    manager = make_cached(pages=5)
    serve(manager, "a", range(9))
    fresh, again = TextContext("fresh", [9] * 8), TextContext("again", range(9))
    for ctx in (fresh, again):
        manager.claim(ctx.request_id)
    manager.alloc_batch([[fresh, again]])
    assert again.cached_prefix_length == 8
    assert manager.get_req_blocks("again")[:2] == [0, 1]
    assert not set(manager.get_req_blocks("fresh")) & {0, 1}


def test_reset_forgets_what_requests_hold_too() -> None:
    manager = make_cached()
    serve(manager, "a", range(9))
    live = start(manager, "b", range(50, 59))
    live.update(1)
    manager.step([live])
    manager.reset_prefix_cache()
    assert start(manager, "a2", range(9)).cached_prefix_length == 0
    assert start(manager, "b2", range(50, 59)).cached_prefix_length == 0


def test_a_private_request_takes_no_page_and_leaves_none() -> None:
    manager = make_cached(pages=20)
    serve(manager, "a", range(9))
    known = manager.committed_digests()
    private = start(manager, "b", range(17), is_private=True)
    assert (private.cached_prefix_length, manager.missing_page(private)) == (0, None)
    assert manager.coming_pages([private]) == set()
    decode(manager, private, *range(1, 6))
    assert manager.committed_digests() == known
    manager.release("b")
    assert start(manager, "c", range(17)).cached_prefix_length == 8


def test_a_chunk_survives_a_hit() -> None:
    manager = make_cached()
    serve(manager, "a", range(9))
    ctx = TextContext("b", range(30))
    ctx.active_length = 6
    manager.claim("b")
    manager.alloc(ctx)
    assert (ctx.processed_length, ctx.active_length) == (8, 6)
    assert len(manager.get_req_blocks("b")) == 4


def test_salts_and_adapters_do_not_share() -> None:
    manager = make_cached(pages=40)
    serve(manager, "a", range(9))
    assert start(manager, "b", range(9), cache_salt=b"x").cached_prefix_length == 0
    assert start(manager, "c", range(9), adapter="x").cached_prefix_length == 0
    assert start(manager, "d", range(9)).cached_prefix_length == 8


def test_without_prefix_caching_nothing_is_committed() -> None:
    manager = make_manager()
    serve(manager, "a", range(9))
    assert start(manager, "b", range(9)).cached_prefix_length == 0


def test_int32_and_int64_tokens_hash_alike() -> None:
    manager = make_cached()
    given = [TextContext("a", np.arange(20, dtype=d)) for d in (np.int32, np.int64, np.uint8)]
    assert len({tuple(manager.page_identities(ctx)) for ctx in given}) == 1


def test_chain_is_the_formula_of_the_spec() -> None:
    parts = (b"kvgraph-page-1", b"model", b"adapter", b"s" * 32, b"salt")
    text = b"".join(len(part).to_bytes(8, "little") + part for part in parts)
    root = chain_root(b"model", "adapter", b"s" * 32, b"salt")
    assert root == sha256(text).digest()
    tokens = np.arange(8, dtype=np.int32)
    first = sha256(root + tokens[:4].astype("<i4").tobytes()).digest()
    second = sha256(first + tokens[4:].astype("<i4").tobytes()).digest()
    assert chain(root, tokens, 4, 0, 2) == [first, second]
    assert chain(first, tokens, 4, 1, 2) == [second]


@pytest.mark.parametrize(
    ("cached", "run", "windows"),
    [
        ("", 0, {0: 5, 1: 0, 2: 0}),
        ("01", 2, {0: 5, 1: 2, 2: 2}),
        ("01234", 5, {0: 5, 1: 5, 2: 5}),
        ("34", 0, {0: 5, 1: 5, 2: 5, 3: 0}),
        ("0 23", 1, {0: 5, 1: 4, 2: 4, 3: 1}),
        ("0", 1, {1: 1, 2: 1, 3: 1}),
    ],
)
def test_longest_run_and_deepest_window(cached: str, run: int, windows: dict[int, int]) -> None:
    digests = [bytes([i]) for i in range(5)]
    index = {bytes([int(c)]) for c in cached if c != " "}
    assert longest_run(digests, index) == run
    assert {w: deepest_window(digests, index, w) for w in windows} == windows


def test_a_window_hit_reads_only_the_last_pages() -> None:
    manager = make_cached(pages=12, window_size=6)
    serve(manager, "a", range(17))
    ctx = start(manager, "b", [*range(16), 99])
    assert ctx.cached_prefix_length == 16
    assert manager.get_req_blocks("b")[:4] == [12, 12, 2, 3]
    assert manager.get_num_used_pages() == 3


def test_joint_hits_are_a_fixed_point() -> None:
    """Each leaf's answer may shorten the other's, until both hold."""
    params = MultiKVCacheParams.from_params(
        {
            name: make_params(window_size=window, enable_prefix_caching=True)
            for name, window in (("full", None), ("sliding", 5), ("wide", 9))
        }
    )
    manager = PagedKVCacheManager(params, None, 20, max_batch_size=4, enable_runtime_checks=True)
    serve(manager, "a", range(33))
    full, sliding, wide = manager._replicas[0].leaves
    digests = manager.page_identities(TextContext("a", range(33)))
    held = {
        "full": [0, 1, 2, 3, 4, 5, 6],
        "sliding": [0, 1, 3, 6],  # needs one page: 7, 4, 2 or 1
        "wide": [0, 1, 2, 3, 5],  # needs two pages: 4, 3, 2, or 1 from the root
    }
    for leaf, pages in zip((full, sliding, wide), held.values(), strict=True):
        for at, digest in enumerate(digests):
            if at not in pages and digest in leaf.pool.index:
                leaf.pool.digests[leaf.pool.index.pop(digest)] = None
    # full 7 -> sliding 7 -> wide 4 -> full 4 -> sliding 4 -> wide 4
    assert start(manager, "b", range(33)).cached_prefix_length == 16
    manager.release("b")
    wide.pool.digests[wide.pool.index.pop(digests[3])] = None
    # ... wide 3 -> sliding 2 -> wide 2
    assert start(manager, "c", range(33)).cached_prefix_length == 8


SCRIPT = """
from kvgraph.contract.params import KVCacheParams
from kvgraph.kv.paged import PagedKVCacheManager
from kvgraph.kv.requests import TextContext
for dtype, identity, salt in (("float32", b"m", b""), ("bfloat16", b"m", b""),
                              ("float32", b"n", b""), ("float32", b"m", b"s")):
    params = KVCacheParams(dtype, 2, 8, 2, page_size=4, enable_prefix_caching=True)
    manager = PagedKVCacheManager(params, None, 4, max_batch_size=1, identity=identity)
    ctx = TextContext("a", range(20), cache_salt=salt)
    print(b"".join(manager.page_identities(ctx)).hex())
"""


def test_two_processes_agree_on_identities() -> None:
    outputs = [
        subprocess.run(
            [sys.executable, "-c", SCRIPT],
            check=True,
            capture_output=True,
            text=True,
            env=os.environ | {"PYTHONHASHSEED": seed},
        ).stdout.split()
        for seed in ("1", "2")
    ]
    assert outputs[0] == outputs[1]
    assert len(set(outputs[0])) == 4
    assert all(len(line) == 4 * 64 for line in outputs[0])
