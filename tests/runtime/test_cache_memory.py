"""The pool that an engine takes where no size is given."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("onnx", reason="the fake runtime evaluates ONNX graphs")

from kvgraph import Engine
from kvgraph.errors import CapacityError
from kvgraph.kv.memory import DEVICE_CACHE_SHARE
from kvgraph.runtime import cache_memory
from kvgraph.runtime.cache_memory import HOST_BYTES
from tests.runtime.tensorrt_machine import PROMPTS, Machine, tokens_of


def test_of_a_gpu_most_of_what_is_free_beside_weights_and_a_step(
    gpu: Machine, compiled: Callable[..., Path]
) -> None:
    gpu.driver.memory = 18 << 20
    session = gpu.artifact().session()
    engine = Engine(session.artifact, session=session, max_batch_size=40)
    taken = engine.stats().num_pages * engine.kv.params.bytes_per_page
    free = session.free_memory()
    assert free + taken <= 18 << 20
    assert taken / (free + taken) == pytest.approx(DEVICE_CACHE_SHARE, rel=0.01)
    shapes = [context.shapes["tokens"] for context in gpu.engine.contexts]
    assert (engine.scheduler.max_batch_tokens,) in shapes
    expected = Engine(compiled("tiny-llama"), num_pages=64)
    assert tokens_of(engine, PROMPTS) == tokens_of(expected, PROMPTS)


def test_a_gpu_without_room_for_a_step_is_refused(gpu: Machine) -> None:
    session = gpu.artifact().session()
    gpu.driver.memory = gpu.driver.memory - session.free_memory() + (1 << 18)
    with pytest.raises(
        CapacityError,
        match=r"^the largest step: expected memory for 16 new tokens and 16 rows of logits in "
        r"262144 bytes .*CUDA_ERROR_OUT_OF_MEMORY\); give a smaller max_batch_tokens",
    ):
        Engine(session.artifact, session=session, max_batch_tokens=16)


def test_a_pool_is_not_larger_than_the_engine_takes(gpu: Machine) -> None:
    session = gpu.artifact().session()
    engine = Engine(session.artifact, session=session, max_batch_size=40)
    assert engine.stats().num_pages == session.limits["num_page_slots"] - 1


def test_a_small_machine_or_container_gives_a_quarter(
    compiled: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache_memory, "memory", lambda: 64 << 20)
    engine = Engine(compiled("tiny-llama"), max_batch_size=10_000)
    assert engine.stats().num_pages == (16 << 20) // engine.kv.params.bytes_per_page


def test_of_host_memory_what_is_said(compiled: Callable[..., Path]) -> None:
    engine = Engine(compiled("tiny-llama"), max_batch_size=10_000)
    assert engine.session.free_memory() is None
    assert engine.stats().num_pages == HOST_BYTES // engine.kv.params.bytes_per_page
