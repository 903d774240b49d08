"""A mixture of experts that is larger than the memory which its process may use: weights stay in
their mapped file, and those of experts in use stay in memory."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("uvicorn", reason="kvgraph serve needs the extra `serve`")

import kvgraph
from kvgraph.contract.file_names import WEIGHTS_NAME
from tests.serve.running import COMMAND, serving
from tests.support.artifacts import ROOT, TINY_LLAMA, shared
from tests.support.memory_groups import memory_group
from tests.support.models import make_model
from tests.support.page_cache import forget

pytestmark = pytest.mark.slow

SHAPE: dict[str, Any] = {
    "vocab_size": 2048,
    "hidden_size": 512,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "num_experts": 64,
    "moe_intermediate_size": 512,
    "num_experts_per_tok": 4,
    "initializer_range": 0.02,
}
READ = [sys.executable, "-m", "tests.runtime.reading"]
GENERATE = [sys.executable, "-m", "kvgraph", "generate"]
PROMPT = "The import statement"

SHARE = 0.6
"""Of the weights' bytes that a process may use for all it has; experts are 98 % of them."""


@pytest.fixture(scope="module")
def artifact() -> Iterator[Path]:
    """On the disk of this clone: a temporary folder may be in memory."""
    with tempfile.TemporaryDirectory(dir=shared("less-memory")) as name:
        model = make_model("qwen3_moe", Path(name, "model"), dtype="bfloat16", **SHAPE)
        for file in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copyfile(TINY_LLAMA / file, model / file)
        out = Path(name, "artifact")
        kvgraph.compile(model, out, weights="int8", cache_dtype="int8", check=False)
        shutil.rmtree(model)
        yield out


@pytest.fixture(autouse=True)
def _without_stamps(monkeypatch: pytest.MonkeyPatch) -> None:
    """No process can note that it has hashed the files: each does, and so reads all of them."""
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null")


def output(command: Sequence[object]) -> Any:
    done = subprocess.run(
        list(map(str, command)), capture_output=True, text=True, cwd=ROOT, timeout=600
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def most(artifact: Path) -> int:
    """Bytes that a process may use. Its weights are on the disk alone then."""
    forget(artifact / WEIGHTS_NAME)
    return int(SHARE * (artifact / WEIGHTS_NAME).stat().st_size)


def test_tokens_are_the_same_and_experts_in_use_stay(artifact: Path) -> None:
    """A prompt and a batch need nearly all experts. Then one text repeats: from its second time on,
    its experts are in memory."""
    expected = output([*READ, artifact])
    with memory_group(most(artifact)) as group:
        found = output(group.command([*READ, artifact]))
        assert group.was_full()
    assert [each["tokens"] for each in found] == [each["tokens"] for each in expected]
    weights = (artifact / WEIGHTS_NAME).stat().st_size
    prompt, batch, *_, last = (each["read"] / weights for each in found)
    assert prompt + batch > 1 - SHARE
    assert last < 0.05


def test_generate_and_serve(artifact: Path, tmp_path: Path) -> None:
    options = ["--max-new-tokens", 16, "--ignore-eos", "--json"]
    command = [*GENERATE, artifact, PROMPT, *options]
    expected = output(command)
    with memory_group(most(artifact)) as group:
        assert output(group.command(command))["token_ids"] == expected["token_ids"]
        assert group.was_full()
    with memory_group(most(artifact)) as group:
        serve = group.command(COMMAND)
        with serving(tmp_path / "log", artifact, "--port", 0, command=serve) as server:
            answer = server.complete(PROMPT, max_tokens=16, ignore_eos=True)
        assert answer["choices"][0]["text"] == expected["text"]
        assert group.was_full()
