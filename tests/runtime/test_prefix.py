"""Precomputed prefixes: bound they save the work; of anything else they are refused."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvgraph
from kvgraph import ArtifactError, Engine, RequestError, SamplingParams
from kvgraph.runtime import prefix_file as prefixes
from kvgraph.runtime.artifact import Artifact
from kvgraph.runtime.prefix import write_prefix
from kvgraph.runtime.prefix_file import Prefix, read_prefix
from tests.support.command_line import run
from tests.support.models import make_model

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


def test_figures_are_of_all_that_are_bound(
    artifact: Artifact, written: Path, tmp_path: Path
) -> None:
    other = write_prefix(Engine(artifact, num_pages=60), TOKENS[50:90], tmp_path / "other.kvp")
    with Engine(artifact, num_pages=60, prefixes=[written, other]) as engine:
        kv: Any = engine.kv
        engine.generate([[*TOKENS, 5, 6]], greedy(1))
        found = kv.tier_stats()["prefix"]
        assert (found.num_pages, found.num_used_pages, found.read) == (6 + 2, 6 + 2, 6)


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


KEYS, PAGES = "keys.", "pages."
REPLACED: dict[str, tuple[str, Callable[[Any], Any], str]] = {
    "no tokens": ("tokens", lambda t: None, r"tokens: expected int32 \[any\] .* got no tensor"),
    "no keys": (KEYS, lambda t: None, r"pages.: expected no tensor .* got uint8 \[6, \d+\]"),
    "no pages": (PAGES, lambda t: None, r"pages.: expected uint8 \[6, any\] .* got no tensor"),
    "wide tokens": ("tokens", lambda t: t.astype(np.int64), r"tokens: .* got int64 \[100\]"),
    "ranks": ("tokens", lambda t: t.reshape(2, -1), r"tokens: .* got int32 \[2, 50\]"),
    "a number": (KEYS, lambda t: t[0, 0], r"keys.: expected uint8 \[0, 32\] .* got uint8 \[\]"),
    "short keys": (KEYS, lambda t: t[:, :31], r"keys.: expected uint8 \[6, 32\] .*\[6, 31\]"),
    "fewer pages": (PAGES, lambda t: t[1:], r"pages.: expected uint8 \[6, any\] .*\[5, \d+\]"),
    "signed pages": (PAGES, lambda t: t.view(np.int8), r"pages.: .* got int8 \[6, \d+\]"),
    "something else": ("more", lambda t: np.zeros(3), r"more: expected no tensor .*float64 \[3\]"),
}


@pytest.mark.parametrize("case", REPLACED)
def test_parts_that_are_missing_or_of_another_kind(
    case: str, written: Path, tmp_path: Path
) -> None:
    """By another version, or on purpose: the hash is right."""
    from safetensors.numpy import load_file, save_file

    prefix, tensors = read_prefix(written), load_file(written)
    name, change, message = REPLACED[case]
    made = change(tensors.pop(name, None))
    if made is not None:
        tensors[name] = np.array(made, order="C")
    metadata = dict(prefix.metadata)
    metadata["sha256"] = prefixes._digest(metadata, tensors)
    save_file(tensors, tmp_path / "other.kvp", metadata)
    with pytest.raises(ArtifactError, match=rf"^{tmp_path}/other.kvp: {message}"):
        read_prefix(tmp_path / "other.kvp")


def test_dtypes_that_numpy_lacks(tmp_path: Path) -> None:
    header = b'{"a":{"dtype":"F8_E4M3","shape":[2],"data_offsets":[0,2]}}'
    path = tmp_path / "small.kvp"
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(2))
    with pytest.raises(ArtifactError, match=r"small.kvp: expected a prefix .* got a damaged file"):
        read_prefix(path)


def test_what_is_no_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path, kind in ((tmp_path / "pipe", "a pipe"), (tmp_path, "a folder")):
        with pytest.raises(ArtifactError, match=rf"{path}: .*\(expected a file, got {kind}\)"):
            read_prefix(path)


def test_only_an_earlier_prefix_is_replaced(
    artifact: Artifact, written: Path, tmp_path: Path
) -> None:
    path = tmp_path / "notes.txt"
    engine = Engine(artifact, num_pages=60)
    (tmp_path / "linked").symlink_to(written)
    for content in (b"mine", written.read_bytes()[:-1]):
        path.write_bytes(content)
        with pytest.raises(RequestError, match=r"notes.txt: expected no such file, or an earlier"):
            write_prefix(engine, TOKENS, path)
        assert path.read_bytes() == content
    with pytest.raises(RequestError, match=r"linked: expected no such file, .* got a link"):
        write_prefix(engine, TOKENS, tmp_path / "linked")
    with pytest.raises(RequestError, match=r"expected a file in a folder that exists"):
        write_prefix(engine, TOKENS, tmp_path / "nowhere" / "a.kvp")
    assert not engine.busy
    path.write_bytes(written.read_bytes())
    write_prefix(engine, TOKENS[:40], path)
    assert read_prefix(path).tokens == TOKENS[:40]
    assert sorted(os.listdir(tmp_path)) == ["linked", "notes.txt"]


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
    with pytest.raises(ArtifactError, match="expected a prefix of kvgraph prefill, got a damaged"):
        read_prefix("a\0b")
    private = Engine(artifact, num_pages=60, enable_prefix_caching=False)
    with pytest.raises(RequestError, match=r"expected a paged cache with prefix caching"):
        write_prefix(private, TOKENS, other)


@pytest.mark.parametrize("prompt", [None, 5, True])
def test_what_is_no_prompt(prompt: Any, artifact: Artifact, tmp_path: Path) -> None:
    message = f"^prompt: expected text or token ids, got {type(prompt).__name__} {prompt}$"
    with pytest.raises(RequestError, match=message):
        write_prefix(Engine(artifact, num_pages=60), prompt, tmp_path / "a.kvp")


def test_a_path_that_no_file_can_have(artifact: Artifact, tmp_path: Path) -> None:
    engine = Engine(artifact, num_pages=60)
    for name in ("a\0b", "n" * 300):
        with pytest.raises(
            RequestError, match=r"^prefix: expected the path of a file, got '.*' \("
        ):
            write_prefix(engine, TOKENS, tmp_path / name)
    assert not engine.busy


def test_a_window_of_one_token_sees_no_page(tmp_path: Path) -> None:
    """Its prefix has no pages, and is none the less one."""
    folder = tmp_path / "model.kvg"
    model = make_model("mistral", tmp_path / "model", sliding_window=1)
    kvgraph.compile(model, folder, backend="onnx", page_size=8, check=False)
    tokens = list(range(3, 43))
    written = write_prefix(Engine(folder, num_pages=40), tokens, tmp_path / "a.kvp")
    assert content(read_prefix(tmp_path / "a.kvp")) == content(written)
    assert (written.tokens, written.pages) == (tokens, {})
    wanted = Engine(folder, num_pages=40).generate([[*tokens, 9]], greedy())
    with Engine(folder, num_pages=40, prefixes=[tmp_path / "a.kvp"]) as engine:
        done = engine.generate([[*tokens, 9]], greedy())
    assert done[0].token_ids == wanted[0].token_ids


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
