"""A machine with a fake GPU and a fake TensorRT, and artifacts for it."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("onnx", reason="the fake runtime evaluates ONNX graphs")

import kvgraph
from kvgraph import SamplingParams
from kvgraph.contract.hashes import hash_files
from kvgraph.contract.manifest import (
    EngineInfo,
    Manifest,
    ProfileInfo,
    read_manifest,
    write_manifest,
)
from kvgraph.runtime.sessions.tensorrt import engine as tensorrt_engine
from tests.runtime.fake_cuda import FakeDriver, install
from tests.runtime.fake_tensorrt import FakeEngine, FakeTensorRT

PROMPTS = ["The import statement", "A list", "def f(x):", "In Python, a dictionary"]
GREEDY = SamplingParams(max_new_tokens=12)


@dataclasses.dataclass
class Machine:
    """A machine with a fake GPU and a fake TensorRT, and artifacts for it."""

    driver: FakeDriver
    trt: FakeTensorRT
    make: Callable[..., Path]

    def artifact(self, model: str = "tiny-llama", **changes: Any) -> Any:
        return kvgraph.load(self.make(model, **changes), verify=False)

    @property
    def engine(self) -> FakeEngine:
        return self.trt.engines[-1]


def fake_machine(
    compiled: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Machine:
    driver = FakeDriver()
    trt = FakeTensorRT(driver, hosted=["max_lengths"])
    install(monkeypatch, driver, tensorrt_rtx=trt)
    monkeypatch.setattr(tensorrt_engine, "plugins_path", lambda: Path("libtensorrt.so"))

    def make(model: str, **changes: Any) -> Path:
        options = changes.pop("options", {})
        folder = tmp_path / f"artifact-{len(list(tmp_path.iterdir()))}"
        shutil.copytree(compiled(model, **options), folder)
        return as_tensorrt(folder, **changes)

    return Machine(driver, trt, make)


def profiles(manifest: Manifest) -> list[ProfileInfo]:
    """Decode: up to 8 rows of one token; prefill: up to 96 tokens of 8 rows."""
    dims = {d.partition(" + ")[0] for b in manifest.inputs for d in b.dims if isinstance(d, str)}
    least = dict.fromkeys(dims, 1)
    most = {d: 512 if d.endswith("_page_slots") else 64 for d in dims}
    most |= {d: n for d, n in {"num_steps": 1, "max_seq_len": 2048}.items() if d in dims}
    rows = {"batch_size": 8, "num_logits": 8, "total_seq_len": 8}
    decode = most | rows
    prefill = most | rows | {"num_logits": 96, "total_seq_len": 96}
    return [
        ProfileInfo("decode", least, decode, decode),
        ProfileInfo("prefill", least, prefill, prefill),
    ]


def as_tensorrt(
    folder: Path,
    engine: dict[str, Any] | None = None,
    target: str = "cuda:sm_86",
    **described: Any,
) -> Path:
    """Turn an ONNX artifact into one of backend tensorrt whose engine is the fake's."""
    manifest = read_manifest(folder)
    ranges = profiles(manifest)
    said = {
        "onnx": str(folder / "model.onnx"),
        "profiles": [dataclasses.asdict(p) for p in ranges],
        **described,
    }
    (folder / "model.engine").write_text(json.dumps(said))
    info = EngineInfo("tensorrt_rtx", "1.7.1.116", ["sm_86"], ranges)

    def moved(bindings: list[Any]) -> list[Any]:
        return [dataclasses.replace(b, device=b.device.replace("cpu", "cuda")) for b in bindings]

    write_manifest(
        folder,
        dataclasses.replace(
            manifest,
            backend="tensorrt",
            target=target,
            inputs=moved(manifest.inputs),
            outputs=moved(manifest.outputs),
            files=manifest.files
            | {"model.engine": hash_files(folder, ["model.engine"])["model.engine"]},
            engine=dataclasses.replace(info, **(engine or {})),
        ),
    )
    return folder


def tokens_of(engine: kvgraph.Engine, prompts: list[Any]) -> list[list[int]]:
    return [done.token_ids for done in engine.generate(prompts, GREEDY)]


ONE_TOKEN = kvgraph.ModelInputs(
    np.array([3], np.int32), np.array([0, 1], np.int32), np.zeros(1, np.int32)
)


def manager_of(session: Any, num_pages: int = 16) -> kvgraph.PagedKVCacheManager:
    params = session.artifact.params()
    return kvgraph.PagedKVCacheManager(params, session, num_pages, max_batch_size=4)
