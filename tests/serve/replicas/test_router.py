"""Ray Serve's router, with an index that does not answer."""

from __future__ import annotations

import asyncio
import warnings
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("ray", reason="pip install 'kvgraph[ray]'")

from kvgraph import SamplingParams
from kvgraph.serve.replicas.messages import Order

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # Ray's own, of pydantic
    from kvgraph.serve.replicas import index_calls
    from kvgraph.serve.replicas.router import PageRouter


def test_replicas_are_chosen_while_the_index_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index_calls, "ANSWER_SECONDS", 0.01)

    async def never(*asked: object) -> list[str]:
        await asyncio.sleep(3600)
        return []

    async def ranks() -> Any:
        router: Any = PageRouter.__new__(PageRouter)
        router._index = SimpleNamespace(choose=SimpleNamespace(remote=never))
        replicas = [SimpleNamespace(replica_id=SimpleNamespace(unique_id=name)) for name in "ab"]
        order = Order("request", b"", SamplingParams(), b"", b"")
        async with asyncio.timeout(30):
            return await router.choose_replicas(replicas, SimpleNamespace(args=[order]))

    found = [replica.replica_id.unique_id for (replica,) in asyncio.run(ranks())]
    assert sorted(found) == ["a", "b"]
