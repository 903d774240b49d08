"""Precomputed prefixes: bound they save the work; of anything else they are refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from command_line import run

import kvgraph
from kvgraph import ArtifactError, Engine, RequestError, SamplingParams
from kvgraph.runtime.artifact import Artifact
from kvgraph.runtime.prefix import Prefix, read_prefix, write_prefix

Compiled = Callable[..., Path]

TOKENS = np.random.default_rng(1).integers(3, 2048, 100).tolist()


@pytest.fixture(scope="module")
def artifact(compiled: Compiled) -> Artifact:
    return kvgraph.load(compiled("tiny-llama"))


@pytest.fixture(scope="module")
def written(artifact: Artifact, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("prefixes") / "system.kvp"
    write_prefix(Engine(artifact, num_pages=60), TOKENS, path)
    return path


def greedy(max_new_tokens: int = 8) -> SamplingParams:
    return SamplingParams(max_new_tokens=max_new_tokens, ignore_eos=True)


def content(prefix: Prefix) -> Any:
    pages = {key: page.tobytes() for key, page in prefix.pages.items()}
    return prefix.tokens, dict(prefix.metadata), pages


def test_it_is_read_as_it_was_written(artifact: Artifact, tmp_path: Path) -> None:
    written = write_prefix(Engine(artifact, num_pages=60), TOKENS, tmp_path / "a.kvp")
    read = read_prefix(tmp_path / "a.kvp")
    assert read.tokens == TOKENS
    assert len(read.pages) == 6
    assert content(read) == content(written)


def test_a_bound_prefix_is_not_computed(artifact: Artifact, written: Path) -> None:
    """Part of it neither, and not after a reset."""
    asked = [[*TOKENS, 5, 6], [*TOKENS[:50], 7]]
    wanted = [d.token_ids for d in Engine(artifact, num_pages=60).generate(asked, greedy())]
    with Engine(artifact, num_pages=60, prefixes=[written]) as engine:
        kv: Any = engine.kv
        assert [done.token_ids for done in engine.generate(asked, greedy())] == wanted
        metrics = kv.get_metrics_aggregated()
        assert (metrics.cache_tokens, metrics.input_tokens) == (96 + 48, 6 + 3)
        kv.reset_prefix_cache()
        kv.reset_metrics()
        assert [done.token_ids for done in engine.generate(asked[:1], greedy())] == wanted[:1]
        assert kv.get_metrics_aggregated().cache_tokens == 96


@pytest.mark.parametrize(
    ("model", "page_size"), [("gemma3_text", 8), ("qwen3", 8), ("tiny-llama", 32)]
)
def test_one_of_another_artifact_is_refused_by_name(
    model: str, page_size: int, written: Path, compiled: Compiled
) -> None:
    other = kvgraph.load(compiled(model, page_size=page_size))
    expected = (
        r"system.kvp: expected a prefix of this artifact and layout \(fingerprint [0-9a-f]{16}\), "
        r"got one of llama, artifact [0-9a-f]{16}"
    )
    with pytest.raises(ArtifactError, match=expected):
        Engine(other, num_pages=60, prefixes=[written])


def test_no_flipped_bit_and_no_cut_is_read(written: Path, tmp_path: Path) -> None:
    whole, damaged = written.read_bytes(), tmp_path / "damaged.kvp"
    random = np.random.default_rng(0)
    start = 8 + int.from_bytes(whole[:8], "little")
    good = content(read_prefix(written))
    for at in [*range(0, start, 3), *random.integers(start, len(whole), 100).tolist()]:
        flipped = bytearray(whole)
        flipped[at] ^= 1 << int(random.integers(8))
        damaged.write_bytes(flipped)
        try:
            assert content(read_prefix(damaged)) == good, at  # white space of the header
        except ArtifactError as error:
            assert "damaged.kvp: " in str(error)
    for end in [0, 4, 8, 100, start, len(whole) // 2, len(whole) - 1]:
        damaged.write_bytes(whole[:end])
        with pytest.raises(ArtifactError, match=r"damaged.kvp: "):
            read_prefix(damaged)


def test_what_is_no_prefix(artifact: Artifact, tmp_path: Path) -> None:
    from safetensors.numpy import save_file

    other = tmp_path / "weights.kvp"
    save_file({"a": np.zeros(3)}, other)
    with pytest.raises(ArtifactError, match=r"weights.kvp: format: expected .* got 'none'"):
        read_prefix(other)
    with pytest.raises(ArtifactError, match=r"no.kvp: expected a prefix .* got no file"):
        read_prefix(tmp_path / "no.kvp")
    with pytest.raises(RequestError, match=r"expected at least a page of 16 tokens, got 3"):
        write_prefix(Engine(artifact, num_pages=60), [3, 4, 5], other)
    private = Engine(artifact, num_pages=60, enable_prefix_caching=False)
    with pytest.raises(RequestError, match=r"expected a paged cache with prefix caching"):
        write_prefix(private, TOKENS, other)


def test_the_command_line(compiled: Compiled, tmp_path: Path) -> None:
    folder, kvp = compiled("tiny-llama"), tmp_path / "system.kvp"
    system = "The import statement finds and loads a module. " * 8
    (tmp_path / "system.txt").write_text(system)
    prompt = ("--prompt-file", tmp_path / "system.txt")
    made = run("prefill", folder, *prompt, "-o", kvp, "--json")
    facts = json.loads(made.out)
    assert facts["pages"] == facts["tokens"] // 16 > 5
    options = ("--max-new-tokens", 12, "--ignore-eos")
    bound = run("generate", folder, "A class", "--prefix", kvp, *options)
    engine = Engine(folder)
    tokens = engine.tokenize(system) + engine.tokenize("A class", special_tokens=False)
    assert bound.out == engine.generate([tokens], greedy(12))[0].text + "\n"
    missing = run("generate", folder, "A class", "--prefix", tmp_path / "no.kvp")
    assert missing.code == 2
    assert "no.kvp: expected a prefix of kvgraph prefill, got no file" in missing.err
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9" * 40)
    latin = run("prefill", folder, "--prompt-file", tmp_path / "latin.txt", "-o", kvp)
    assert (latin.code, "latin.txt: expected text in UTF-8" in latin.err) == (2, True)
