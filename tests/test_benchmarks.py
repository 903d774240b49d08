"""Programs of benchmarks/ on models that are small."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from gguf import GGUFReader

import kvgraph
from benchmarks import mixture, step
from kvgraph.bench.limits import Limits
from tests.support.command_line import run

SMALL: dict[str, Any] = {
    "vocab_size": 2048,
    "hidden_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "initializer_range": 0.15,
}
SIZES = ["--threads", "1", "--prompt", "24", "--new-tokens", "4", "--batches", "1,3"]
SIZES += ["--requests", "2", "--repeats", "1"]


def run_here(*arguments: str | Path) -> None:
    outcome = run(*arguments)
    assert outcome.code in (0, None), outcome
    print(outcome.out)


def test_the_mixture_is_compiled_measured_and_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(mixture, "SHAPE", mixture.SHAPE | SMALL)
    monkeypatch.setattr(mixture, "kvgraph", run_here)
    monkeypatch.setattr("sys.argv", ["mixture", "--folder", str(tmp_path), *SIZES])
    with mock.patch("kvgraph.bench.run.read_limits", return_value=Limits(1e-3, 1, [], "")):
        mixture.main()
    for weights, pool in mixture.POOLS.items():
        artifact = kvgraph.load(tmp_path / weights)
        (experts,) = artifact.manifest.mixtures
        assert (experts.layers, experts.experts, experts.active) == (1, 4, 2)
        assert artifact.manifest.weights == weights
        assert {leaf.pool_dtype for leaf in artifact.params().leaves.values()} == {pool}
    out = capsys.readouterr().out
    report = json.loads((tmp_path / "bench.json").read_text())
    names = [case["name"] for case in report["cases"]]
    assert names == ["batch 1 x 24", "batch 3 x 24", "2 ragged"]  # no other contexts
    assert all(name in out for name in names)
    assert out.rstrip().endswith(mixture.table(report))


def test_the_mixture_of_a_folder_is_not_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Peers convert it again when its files are others; llama.cpp's files are made from it."""
    commands: list[tuple[str | Path, ...]] = []
    monkeypatch.setattr(mixture, "SHAPE", mixture.SHAPE | SMALL)
    monkeypatch.setattr(mixture, "kvgraph", lambda *given: commands.append(given))
    given = ["--peers", "vllm=python", "--peers", "llama.cpp:int8+int4=python"]
    times = []
    for _ in range(2):
        mixture.measure(tmp_path, tmp_path / "out.json", given)
        files = [tmp_path / "model" / "model.safetensors", *(tmp_path / "peers").iterdir()]
        times.append({path.name: path.stat().st_mtime_ns for path in files})
    assert times[0] == times[1]
    for kind in ("Q8_0", "Q4_0"):
        reader = GGUFReader(tmp_path / "peers" / f"llama.cpp-{kind.lower()}.gguf")
        types = {each.tensor_type.name for each in reader.tensors if len(each.shape) > 1}
        assert types == {kind, "F32"}  # routers have 32 bits
    assert commands[:4] == commands[4:]
    assert [each[0] for each in commands[:4]] == ["compile", "compile", "compile", "bench"]
    assert commands[3][-6:] == (*given, "--save", tmp_path / "out.json")


def test_the_table_of_goals() -> None:
    def figure(what: str, case: str, share: float | None, ratio: float | None) -> dict[str, Any]:
        return {"engine": "int8", "what": what, "case": case, "share": share, "ratio": ratio}

    def engine(name: str, *, ours: bool) -> dict[str, Any]:
        return {"name": name, "ours": ours, "peak_rss_bytes": 230_000_000, "pool_bytes": 10_000_000}

    report = {
        "engines": [engine("int8", ours=True), engine("int4", ours=True), engine("x", ours=False)],
        "counts": {name: {"file_bytes": 100_000_000} for name in ("int8", "int4")},
        "figures": [
            figure("prefill", "batch 1 x 512", 0.6, 1.5),
            figure("decode", "batch 1 x 512", 0.47, 1.2),
            figure("decode", "batch 16 x 512", 0.8, None),
        ],
    }
    lines = [line.split() for line in mixture.table(report).splitlines()[2:]]
    assert lines == [["int8", "47%", "120", "1.20"], ["int4", "-", "120", "-"]]


def test_the_parts_of_a_step_are_timed(
    compiled: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(step, "STEPS", 2)
    monkeypatch.setattr(step, "WARM", 1)
    monkeypatch.setattr("sys.argv", ["step", str(compiled("tiny-llama")), "--batch", "2", "--json"])
    step.main()
    rows = json.loads(capsys.readouterr().out)
    assert len(rows) == 2 * len(step.SETTINGS)  # of the model's vocabulary, and of a wide one
    for parts in rows.values():
        assert list(parts) == [*step.PARTS, "rest", "outside", "whole step"]
        assert min(parts["whole step"], parts[step.MODEL], parts["sample"]) > 0
    assert step.table(rows).count("the goal") == len(rows)
