"""`kvgraph bench` as a user runs it, on tiny-llama: what it prints and writes, what it refuses."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

import kvgraph
from kvgraph import RequestError
from kvgraph.bench.limits import Gemm, Limits
from kvgraph.bench.protocol import Case, Settings, check_lengths, make_prompts, plan_cases
from tests.support.command_line import Outcome, run

Compiled = Callable[..., Path]
ModelFolder = Callable[[str], Path]

TINY: list[Any] = ["--threads", 1, "--prompt", 24, "--new-tokens", 4, "--batches", "1,3"]
TINY += ["--context", 40, "--requests", 4, "--repeats", 2]
READING = Limits(1e-3, 1, [Gemm("float32", "numpy", 1.0)], "no torch here")
CASES = ["batch 1 x 24", "batch 3 x 24", "batch 3 x 40", "4 ragged"]

FAILING_VLLM = """
__version__ = "0.0"
SamplingParams = TokensPrompt = None
def LLM(*arguments, **settings):
    print("noise that is no event")
    raise RuntimeError("no cache\\n  for this model")
"""


@pytest.fixture(scope="module")
def artifact(compiled: Compiled) -> Path:
    return compiled("tiny-llama")


def interpreter(folder: Path, **packages: str) -> Path:
    """A Python that finds `packages` (name -> source) before all others."""
    for name, source in packages.items():
        (folder / name).mkdir(parents=True)
        (folder / name / "__init__.py").write_text(source)
    path = folder / "python"
    path.write_text(f'#!/bin/sh\nPYTHONPATH="{folder}" exec "{sys.executable}" "$@"\n')
    path.chmod(0o755)
    return path


@pytest.fixture(scope="module")
def measured(
    artifact: Path, model_folder: ModelFolder, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Outcome, dict[str, Any], Path]:
    """One run with transformers, and a peer that fails: screen, JSON and the pictures' folder."""
    folder = tmp_path_factory.mktemp("bench")
    python = interpreter(folder / "environment", vllm=FAILING_VLLM)
    command = ["bench", artifact, *TINY, "--model", model_folder("tiny-llama")]
    command += ["--peers", f"transformers={sys.executable}", "--peers", f"vllm:bf16={python}"]
    command += ["--save", folder / "out.json", "--plot", folder / "out.svg"]
    with mock.patch("kvgraph.bench.run.read_limits", return_value=READING):
        outcome = run(*command)
    assert outcome.code in (0, None), outcome
    return outcome, json.loads((folder / "out.json").read_text()), folder


def test_the_table(measured: tuple[Outcome, dict[str, Any], Path], artifact: Path) -> None:
    """Every kind of figure with its engines, class and pool; 100 columns hold it uncut."""
    out = measured[0].out
    assert "…" not in out
    table = out[: out.index("Engines")]
    assert max(map(len, table.splitlines())) <= 100
    assert "4 new tokens, 1 thread\n" in re.sub(" +\n", "\n", table)
    titles = [f"{what}, {case}" for case in CASES[:3] for what in ("prefill", "decode")]
    headings = [line.strip() for line in table.splitlines() if re.match(r"  ?\S", line)]
    assert [line for line in headings if line in [*titles, CASES[3]]] == [*titles, CASES[3]]
    for name in (artifact.name, "transformers fp32"):
        rows = re.findall(rf"^ +{re.escape(name)} +fp32 +float32 +\S", table, re.MULTILINE)
        assert len(rows) == 7
    prefill = re.findall(r"^ +prefill.*\n( +\S+ .*)", table, re.MULTILINE)
    assert [re.fullmatch(r".* \d+% +\S+x +\S+x *", line) is not None for line in prefill] == [
        True
    ] * 3


def test_a_peer_that_fails_is_a_line_with_its_reason(
    measured: tuple[Outcome, dict[str, Any], Path],
) -> None:
    outcome, data, _ = measured
    assert "failed: no cache for this model" in " ".join(outcome.out.split())
    assert data["engines"][2]["error"] == "no cache for this model"
    assert data["engines"][2]["cases"] == {}


def test_the_json_holds_everything(
    measured: tuple[Outcome, dict[str, Any], Path], artifact: Path
) -> None:
    data = measured[1]
    assert data["settings"]["prompt"] == 24
    assert data["settings"]["threads"] == 1
    assert data["machine"]["flags"]
    assert [each["name"] for each in data["cases"]] == CASES
    assert len(data["limits"]) == 4  # before, between and after three engines
    assert data["limits"][0]["gemms"] == [{"dtype": "float32", "library": "numpy", "gflops": 1.0}]
    ours, peer, _ = data["engines"]
    assert ours["versions"].keys() == {"kvgraph", "onnxruntime"}
    assert (ours["pool_dtype"], ours["precision"]) == ("float32", "fp32")
    assert peer["versions"].keys() == {"transformers", "torch"}
    for engine in (ours, peer):
        assert len(engine["starts_s"]) == 2
        assert all(start > 0 for start in engine["starts_s"])
        assert engine["peak_rss_bytes"] >= engine["cases"][CASES[0]]["rss_bytes"] > 1 << 20
        for name in CASES:
            case = engine["cases"][name]
            assert len(case["tn_s"]) == 2
            assert len(case["t1_s"]) == len(case["tl_s"]) == (0 if name == CASES[3] else 2)
    manifest = kvgraph.load(artifact).manifest
    page = 2 * 4 * 16 * 4 * 16 * 4  # kinds, layers, tokens, heads, head_dim, bytes
    assert ours["pool_bytes"] % page == 0
    assert data["counts"][artifact.name]["head"] == manifest.model.vocab_size * 128


def test_all_engines_got_the_same_ids(
    measured: tuple[Outcome, dict[str, Any], Path], artifact: Path
) -> None:
    """In float32 they generate the same, what the engine generates for the protocol's prompts."""
    ours, peer, _ = measured[1]["engines"]
    assert {name: ours["cases"][name]["first_ids"] for name in CASES} == {
        name: peer["cases"][name]["first_ids"] for name in CASES
    }
    case = Case(CASES[1], "batch", (24,) * 3, 4, 2)
    prompts = make_prompts(case, 2048, 0, 7)
    engine = kvgraph.Engine(artifact, num_pages=64)
    done = engine.generate(prompts, kvgraph.SamplingParams(max_new_tokens=4, ignore_eos=True))
    assert ours["cases"][CASES[1]]["first_ids"] == done[0].token_ids


def test_the_picture(measured: tuple[Outcome, dict[str, Any], Path]) -> None:
    """Both panels and the legend: what they say is in the file as comments."""
    text = (measured[2] / "out.svg").read_text()
    assert text.startswith("<?xml")
    for word in ("transformers fp32", "batch", "tokens of prompt"):
        assert f"<!-- {word}" in text


def test_json_on_stdout_and_png(artifact: Path, tmp_path: Path) -> None:
    options = ("--requests", 0, "--batches", 1, "--prompt", 8, "--new-tokens", 2, "--repeats", 1)
    with mock.patch("kvgraph.bench.run.read_limits", return_value=READING):
        command = ("bench", artifact, *options, "--context", "", "--plot", tmp_path / "a.png")
        outcome = run(*command, "--json")
    data = json.loads(outcome.out)
    assert [each["name"] for each in data["cases"]] == ["batch 1 x 8"]
    assert data["limits"][0]["missing"] == "no torch here"
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")


def test_an_artifact_that_fails_is_a_line_too_and_exit_code_1(
    artifact: Path, tmp_path: Path
) -> None:
    with mock.patch("kvgraph.bench.run.read_limits", return_value=READING):
        outcome = run("bench", artifact, *TINY, "--timeout", 0.01)
    assert outcome.code == 1
    assert "failed: expected to end within 0.01 s, did not" in " ".join(outcome.out.split())


@pytest.mark.parametrize(
    ("model", "options", "pool"),
    [
        ("tiny-llama", {"cache": "continuous"}, "float32"),
        ("tiny-llama", {"cache": "padded"}, "float32"),
        ("gemma2", {"cache_dtype": "int8"}, "int8"),
    ],
    ids=["continuous", "padded", "windows of int8"],
)
def test_every_kind_of_cache(
    compiled: Compiled, tmp_path: Path, model: str, options: dict[str, Any], pool: str
) -> None:
    artifact, save = compiled(model, **options), tmp_path / "a.json"
    small = ("--prompt", 20, "--new-tokens", 3, "--batches", "1,2", "--context", 60)
    with mock.patch("kvgraph.bench.run.read_limits", return_value=READING):
        outcome = run("bench", artifact, *small, "--requests", 3, "--repeats", 1, "--save", save)
    assert outcome.code in (0, None), outcome
    (engine,) = json.loads(save.read_text())["engines"]
    assert engine["pool_dtype"] == pool
    assert engine["error"] is None
    assert all(case["error"] is None for case in engine["cases"].values())
    assert len(engine["cases"]) == 4


def test_several_artifacts(compiled: Compiled, tmp_path: Path) -> None:
    """Measured in turn, named by their paths where their folders have one name."""
    folders = [compiled("tiny-llama"), compiled("tiny-llama", cache="continuous")]
    small = ("--prompt", 8, "--new-tokens", 2, "--batches", 1, "--context", "", "--requests", 0)
    save = tmp_path / "a.json"
    with mock.patch("kvgraph.bench.run.read_limits", return_value=READING):
        outcome = run("bench", *folders, *small, "--repeats", 1, "--save", save)
    assert outcome.code in (0, None), outcome
    data = json.loads(save.read_text())
    assert [engine["name"] for engine in data["engines"]] == [str(folder) for folder in folders]
    ids = [engine["cases"]["batch 1 x 8"]["first_ids"] for engine in data["engines"]]
    assert ids[0] == ids[1]
    assert "vs class" not in outcome.out  # there are no peers


def test_ragged_prompts_that_are_not_run_are_not_checked() -> None:
    settings = Settings(threads=1, prompt=1400, new_tokens=16, contexts=(), prefix_caching=True)
    cases = plan_cases(settings, 4096)
    check_lengths(settings, cases, 2048)
    assert [case.kind for case in cases] == ["batch", "batch"]
    settings = replace(settings, prefix_caching=False)
    with pytest.raises(RequestError, match="requests: expected at most 2048 tokens"):
        check_lengths(settings, plan_cases(settings, 4096), 2048)


def test_prompts_computed_once(artifact: Path, tmp_path: Path) -> None:
    """`--prefix-caching`: decode alone, and a cold start all the same."""
    path = tmp_path / "out.json"
    with mock.patch("kvgraph.bench.run.read_limits", return_value=READING):
        outcome = run("bench", artifact, *TINY, "--prefix-caching", "--save", path)
    assert outcome.code in (0, None), outcome
    assert [line for line in outcome.out.splitlines() if "prefill, " in line] == []
    assert all(f"decode, {case}" in outcome.out for case in CASES[:3])
    (engine,) = json.loads(path.read_text())["engines"]
    assert engine["error"] is None
    assert len(engine["starts_s"]) == 2


def test_files_of_an_earlier_run_are_replaced(
    measured: tuple[Outcome, dict[str, Any], Path], artifact: Path, tmp_path: Path
) -> None:
    for name in ("out.json", "out.svg"):
        shutil.copy(measured[2] / name, tmp_path)
    before = (tmp_path / "out.svg").read_bytes()
    options = ("--save", tmp_path / "out.json", "--plot", tmp_path / "out.svg")
    with mock.patch("kvgraph.bench.run.read_limits", return_value=READING):
        assert run("bench", artifact, *TINY, *options).code in (0, None)
    assert (tmp_path / "out.svg").read_bytes() != before
    assert len(json.loads((tmp_path / "out.json").read_text())["engines"]) == 1
    assert sorted(os.listdir(tmp_path)) == ["out.json", "out.svg"]
