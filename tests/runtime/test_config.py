"""Records of an engine's settings; every field is a keyword of the engine too."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import FrozenInstanceError, fields
from pathlib import Path
from typing import Any, get_type_hints

import numpy as np
import pytest

import kvgraph
from kvgraph import BatchConfig, CacheConfig, Engine, RequestError, TierConfig
from kvgraph.runtime.artifact import Artifact
from kvgraph.runtime.config import ConfigFields

RECORDS: dict[str, Any] = {"cache": CacheConfig, "tiers": TierConfig, "batch": BatchConfig}


@pytest.fixture(scope="module")
def artifact(compiled: Callable[..., Path]) -> Artifact:
    return kvgraph.load(compiled("tiny-llama"))


def refused(message: str) -> Any:
    return pytest.raises(RequestError, match=f"^{re.escape(message)}$")


def test_every_field_is_a_keyword_of_the_same_type() -> None:
    types = [get_type_hints(kind) for kind in RECORDS.values()]
    assert get_type_hints(ConfigFields) == {name: t for each in types for name, t in each.items()}
    assert sum(map(len, types)) == len(get_type_hints(ConfigFields))


def test_records_and_keywords_mean_the_same(artifact: Artifact, tmp_path: Path) -> None:
    values: dict[str, dict[str, Any]] = {
        "cache": {"cache_memory": "1 MiB", "enable_prefix_caching": True},
        "tiers": {"host_memory": "64KiB", "disk": tmp_path, "disk_bytes": "1GiB"},
        "batch": {"max_batch_size": 3, "max_batch_tokens": 40},
    }
    flat = {name: value for each in values.values() for name, value in each.items()}
    records = {name: RECORDS[name](**each) for name, each in values.items()}
    for options in (flat, records):
        with Engine(artifact, **options) as engine:
            kv: Any = engine.kv
            assert kv.total_num_blocks() == (1 << 20) // 32768
            assert kv.get_num_host_pages() == 2
            assert kv.params.enable_prefix_caching
            assert engine.scheduler.max_batch_size == 3
            assert engine.scheduler.max_batch_tokens == 40
            assert len(engine.generate([[5] * 20])[0].token_ids) > 0
    assert list(tmp_path.iterdir())


@pytest.mark.parametrize("name", RECORDS)
def test_a_record_and_one_of_its_keywords(artifact: Artifact, name: str) -> None:
    kind = RECORDS[name]
    for field in fields(kind):
        why = f"expected one of the two, got both; give {field.name} in the {kind.__name__}"
        options: dict[str, Any] = {name: kind(), field.name: field.default}
        with refused(f"{name}, {field.name}: {why}"):
            Engine(artifact, **options)


def test_fields_that_contradict_each_other() -> None:
    with refused("num_pages, cache_memory: expected one of the two, got 4 pages and 1024 bytes"):
        CacheConfig(num_pages=4, cache_memory="1KiB")
    with refused(
        "total_num_host_pages, host_memory: expected one of the two, got 0 pages and 1024 bytes"
    ):
        TierConfig(total_num_host_pages=0, host_memory="1KiB")
    with refused("disk_bytes: expected a folder, disk, that it limits, got 1024 bytes and no disk"):
        TierConfig(disk_bytes="1KiB")


@pytest.mark.parametrize("name", RECORDS)
def test_something_else_than_a_record(artifact: Artifact, name: str) -> None:
    options: dict[str, Any] = {name: {}}
    with refused(f"{name}: expected a {RECORDS[name].__name__}, got dict {{}}"):
        Engine(artifact, **options)


def test_an_unknown_keyword(artifact: Artifact) -> None:
    options: dict[str, Any] = {"num_page": 8}
    with pytest.raises(TypeError, match=r"unexpected keyword argument 'num_page'$"):
        Engine(artifact, **options)


def test_a_record_holds_checked_values(tmp_path: Path) -> None:
    pages: Any = np.int64(8)
    assert type(CacheConfig(num_pages=pages).num_pages) is int
    assert CacheConfig(cache_memory="1 MiB") == CacheConfig(cache_memory=1 << 20)
    assert TierConfig(host_memory="1KiB").host_nbytes == 1024
    assert TierConfig(prefixes=[tmp_path]).prefixes == (tmp_path,)
    with refused("max_batch_size: expected >= 1, got 0"):
        BatchConfig(max_batch_size=0)
    with refused("max_prefill_tokens: expected >= 1, 'auto' or None, got 0"):
        BatchConfig(max_prefill_tokens=0)
    with pytest.raises(FrozenInstanceError):
        BatchConfig().max_batch_size = 3  # type: ignore[misc]
