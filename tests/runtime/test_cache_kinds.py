"""Every kind of cache runs a model to the same tokens; windows, hits and steps are exact."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvgraph
from kvgraph.contract.inputs import KVCacheInputs
from kvgraph.kv.padded import PaddedKVCacheManager
from kvgraph.kv.paged import PagedKVCacheManager
from kvgraph.kv.requests import TextContext
from kvgraph.runtime.artifact import Artifact
from tests.runtime.drive import inputs_of, prefill, run_step

Compiled = Callable[..., Path]
ROOT = Path(__file__).parents[2]
PAGE = 16
PROMPTS = [list(range(3, 3 + n)) for n in (1, 16, 40, 75)]
GREEDY = kvgraph.SamplingParams(max_new_tokens=30, ignore_eos=True)


def greedy(folder: Path, **options: Any) -> list[list[int]]:
    engine = kvgraph.Engine(folder, max_batch_size=4, **options)
    return [done.token_ids for done in engine.generate(PROMPTS, GREEDY)]


@pytest.mark.parametrize("model", ["tiny-llama", "gemma2", "gpt_oss"])
@pytest.mark.parametrize("kind", ["continuous", "padded"])
def test_kinds_give_the_paged_caches_tokens(model: str, kind: str, compiled: Compiled) -> None:
    assert greedy(compiled(model, cache=kind)) == greedy(compiled(model))


@pytest.mark.parametrize("kind", ["paged", "continuous", "padded"])
def test_a_step_that_is_interrupted_costs_no_token(
    kind: str, compiled: Compiled, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After its tokens are made, and before: every kind starts over with what it has."""
    engine = kvgraph.Engine(compiled("tiny-llama", cache=kind), max_batch_size=4)
    wanted = [done.token_ids for done in engine.generate(PROMPTS, GREEDY)]
    found: dict[str, list[int]] = {engine.submit(prompt, GREEDY): [] for prompt in PROMPTS}
    for name in ("step", "runtime_inputs"):
        for token in engine.step() + engine.step():
            found[token.request_id].append(token.token_id)
        with monkeypatch.context() as patch:
            patch.setattr(engine.kv, name, no_memory)
            with pytest.raises(MemoryError):
                engine.step()
    while engine.busy:
        for token in engine.step():
            found[token.request_id].append(token.token_id)
    assert list(found.values()) == wanted
    assert engine.repairs == 2
    assert engine.kv.num_free_blocks() == engine.kv.total_num_blocks()  # type: ignore[attr-defined]


def no_memory(*_: Any, **__: Any) -> Any:
    raise MemoryError


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["continuous", "padded"])
def test_kinds_under_torch(kind: str, compiled: Compiled) -> None:
    assert greedy(compiled("gemma2", "torch", cache=kind)) == greedy(compiled("gemma2"))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize(
    ("model", "backend"), [("tiny-llama", "onnx"), ("gemma2", "onnx"), ("tiny-llama", "torch")]
)
def test_a_value_that_is_not_finite_stays_in_its_row(
    model: str, backend: str, value: float, compiled: Compiled
) -> None:
    """Of two rows of a padded cache, the other one keeps its bits; so does a position that no row
    has reached."""
    session = kvgraph.load(compiled(model, backend, cache="padded")).session()
    logits = {}
    for stored in (None, value):
        manager = PaddedKVCacheManager(session.artifact.params(), 2, 16, session=session)
        contexts = [TextContext("a", [5, 6, 7]), TextContext("b", [8, 9, 10])]
        for context in contexts:
            manager.claim(context.request_id)
        for step in range(2):
            manager.alloc_batch([contexts])
            (record,) = manager.fetch(contexts)
            if stored is not None and step:
                v_LBSKD = record.v_cache.handle
                v_LBSKD[:, 1, 1, 0, 3] = v_LBSKD[:, 0, 9] = stored
            kv = KVCacheInputs([record])
            logits[stored] = session.run(inputs_of(contexts), kv).copy()
            for context in contexts:
                context.update(11)
            manager.step([contexts])
    assert np.isfinite(logits[None]).all()
    assert logits[value][0].tobytes() == logits[None][0].tobytes()
    assert np.isnan(logits[value][1]).all()


def test_a_kind_without_pages_takes_no_pool_size(compiled: Compiled) -> None:
    notes = kvgraph.load(compiled("tiny-llama", cache="padded")).manifest.notes
    assert notes[0] == "page_size: 16 has no effect, a padded cache has no pages"
    with pytest.raises(kvgraph.RequestError, match="expected None for a padded cache, got 8"):
        kvgraph.Engine(compiled("tiny-llama", cache="padded"), num_pages=8)
    with pytest.raises(kvgraph.UnsupportedError, match=r"cache_dtype: .* padded cache, got 'int8'"):
        compiled("tiny-llama", cache="padded", cache_dtype="int8")


def manager_of(artifact: Artifact, session: Any, pages: int, **params: Any) -> PagedKVCacheManager:
    return PagedKVCacheManager(
        artifact.params(**params), session, pages, max_batch_size=4, enable_runtime_checks=True
    )


# -- windows


def test_sliding_layers_hold_only_their_window(compiled: Compiled) -> None:
    """gemma2 here: window 24, page 16, so at most 3 pages are seen by any one query."""
    null = 40
    engine = kvgraph.Engine(compiled("gemma2"), num_pages=null, max_batch_tokens=PAGE)
    request = engine.submit(PROMPTS[-1], kvgraph.SamplingParams(max_new_tokens=90, ignore_eos=True))
    most = {"sliding": 0, "full": 0}
    while engine.busy:
        engine.step()
        for leaf in most if engine.kv.contains(request) else ():
            blocks = engine.kv.get_req_blocks(request, leaf=leaf)  # type: ignore[call-arg]
            most[leaf] = max(most[leaf], sum(block != null for block in blocks))
    assert most == {"sliding": 3, "full": 11}


# -- multistep


@pytest.mark.parametrize("model", ["tiny-llama", "gemma2"])
def test_steps_without_the_manager_between_them(model: str, compiled: Compiled) -> None:
    """Six decode steps of three rows from one `runtime_inputs`, as the engine generates them."""
    artifact, steps = kvgraph.load(compiled(model)), 6
    sampling = kvgraph.SamplingParams(max_new_tokens=steps + 1, ignore_eos=True)
    expected = [
        done.token_ids
        for done in kvgraph.Engine(artifact, num_pages=40).generate(PROMPTS[:3], sampling)
    ]
    session = artifact.session()
    manager = manager_of(artifact, session, 40)
    contexts = [TextContext(f"r{i}", prompt) for i, prompt in enumerate(PROMPTS[:3])]
    with manager.reserve([contexts]):
        logits = session.run(inputs_of(contexts), manager.runtime_inputs([contexts]))
        tokens = [[int(token)] for token in logits.argmax(-1)]
        for context, (token,) in zip(contexts, tokens, strict=True):
            context.update(token)
        manager.alloc_batch([contexts], num_steps=steps)
        kv = manager.runtime_inputs([contexts], num_steps=steps)
        inputs = inputs_of(contexts)
        for step in range(steps):
            inputs.tokens = np.array([row[-1] for row in tokens], np.int32)
            for row, token in zip(tokens, session.run(inputs, kv).argmax(-1), strict=True):
                row.append(int(token))
            if step + 1 < steps:
                kv = manager.increment_cache_lengths(kv, inputs)
    assert tokens == expected


# -- prefix cache


def test_logits_of_a_hit_equal_a_cold_run(compiled: Compiled) -> None:
    """Bit-equal where the chunks are equal, 1e-5 where not, also after evictions."""
    artifact = kvgraph.load(compiled("tiny-llama"))
    session = artifact.session()
    random = np.random.default_rng(3)
    shared = random.integers(3, 2048, 4 * PAGE).tolist()
    prompt = shared + random.integers(3, 2048, 21).tolist()
    whole = prefill(session, manager_of(artifact, session, 12), TextContext("a", prompt))
    chunked = prefill(
        session, manager_of(artifact, session, 12), TextContext("b", prompt), chunk=len(shared)
    )

    manager = manager_of(artifact, session, 12, enable_prefix_caching=True)
    prefill(session, manager, TextContext("first", [*shared, 5]), chunk=len(shared))
    manager.release("first")
    warm = TextContext("warm", prompt)
    hit = prefill(session, manager, warm)
    assert warm.cached_prefix_length == len(shared)
    np.testing.assert_array_equal(hit, chunked)
    np.testing.assert_allclose(hit, whole, rtol=0, atol=1e-5 * np.abs(whole).max())
    manager.release("warm")

    for i in range(6):  # 12 pages: these push the prefix out, page by page
        other = TextContext(i, random.integers(3, 2048, 5 * PAGE).tolist())
        prefill(session, manager, other)
        manager.release(i)
        again = TextContext(f"again {i}", prompt)
        logits = prefill(session, manager, again)
        np.testing.assert_allclose(logits, whole, rtol=0, atol=1e-5 * np.abs(whole).max())
        manager.release(again.request_id)
    assert manager.get_metrics_aggregated().evictions > 0


# -- quantised pools


def held_out_tokens(artifact: Artifact, count: int) -> list[int]:
    path = ROOT / "examples" / "tiny-llama" / "train.py"
    spec = importlib.util.spec_from_file_location("train", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    text = "\n\n".join(module.corpus()[1])
    return kvgraph.Engine(artifact, num_pages=8).tokenize(text)[:count]


def perplexity(folder: Path, tokens: list[int], session: str | None = None) -> float:
    """Over windows of 256 tokens, processed in chunks of 64 so that the pool is read back."""
    artifact = kvgraph.load(folder)
    run = artifact.session(session)
    losses = []
    for start in range(0, len(tokens), 256):
        window = tokens[start : start + 256]
        manager = manager_of(artifact, run, 20)
        context = TextContext("r", window)
        manager.claim("r")
        chunks = []
        for _ in range(0, len(window), 64):
            context.active_length = min(64, len(window) - context.processed_length)
            chunks.append(run_step(run, manager, context, every_token=True)[0])
        logits = np.concatenate(chunks)[:-1].astype(np.float64)
        top = logits.max(-1, keepdims=True)
        total = np.log(np.exp(logits - top).sum(-1)) + top[:, 0]
        losses.append(total - logits[np.arange(len(window) - 1), window[1:]])
    return float(np.exp(np.concatenate(losses).mean()))


@pytest.mark.parametrize("cache_dtype", ["int8", "float8_e4m3fn", "bfloat16"])
def test_perplexity_of_small_pools(cache_dtype: str, compiled: Compiled) -> None:
    tokens = held_out_tokens(kvgraph.load(compiled("tiny-llama")), 2048)
    exact = perplexity(compiled("tiny-llama"), tokens)
    small = perplexity(compiled("tiny-llama", cache_dtype=cache_dtype), tokens)
    assert small == pytest.approx(exact, rel=0.01)
    assert small != exact


@pytest.mark.parametrize("cache_dtype", ["int8", "float8_e4m3fn"])
def test_quantised_sessions_agree(cache_dtype: str, compiled: Compiled) -> None:
    """ONNX Runtime, and the NumPy reference, on two pools with scales of their own."""
    folder = compiled("gemma2", cache_dtype=cache_dtype)
    assert greedy(folder, num_pages=40) == greedy(folder, num_pages=40, session="reference")


@pytest.mark.slow
@pytest.mark.parametrize("cache_dtype", ["int8", "float8_e4m3fn"])
def test_quantised_pools_under_torch(cache_dtype: str, compiled: Compiled) -> None:
    onnx = compiled("gemma2", cache_dtype=cache_dtype)
    assert greedy(compiled("gemma2", "torch", cache_dtype=cache_dtype)) == greedy(onnx)
