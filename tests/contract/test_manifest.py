"""Manifests with any field of another kind, and a right hash: one sentence, never a traceback."""

from __future__ import annotations

import copy
import hashlib
import io
import json
import os
import random
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import kvgraph
from kvgraph.cli.show import show
from kvgraph.contract.dims import split_dim
from kvgraph.contract.manifest import read_manifest, write_manifest
from kvgraph.contract.plain import to_json
from kvgraph.errors import ArtifactError, KVGraphError
from kvgraph.runtime.artifact import verify
from tests.support.command_line import run
from tests.support.outputs import another_user

Compiled = Callable[..., Path]
Way = tuple[str | int, ...]

OTHER_KINDS: list[Any] = [
    *(None, True, 0, -1, 1 << 63, 10**30, 1.5, float("nan"), "", "x", "a\0b", "../x", "[red]"),
    *([], [1], [None], [[]], {}, {"a": 1}, {"a": {}}, {"": None}),
]
MUTATIONS = 250
"""Of each artifact; all of them (about 3,000) take minutes."""


def ways(value: Any, way: Way = ()) -> Iterator[Way]:
    """Where each field is, and the first entries of lists."""
    keys: Any = value if isinstance(value, dict) else range(min(3, len(value)))
    for key in keys:
        yield (*way, key)
        if isinstance(value[key], dict | list):
            yield from ways(value[key], (*way, key))


def write(folder: Path, fields: dict[str, Any]) -> None:
    hashed = fields | {"sha256": hashlib.sha256(to_json(fields)).hexdigest()}
    (folder / "manifest.json").write_text(json.dumps(hashed))


def fields_of(folder: Path) -> dict[str, Any]:
    fields: dict[str, Any] = json.loads((folder / "manifest.json").read_text())
    del fields["sha256"]
    return fields


@pytest.fixture
def artifact(tmp_path: Path, compiled: Compiled) -> Path:
    return Path(shutil.copytree(compiled("tiny-llama"), tmp_path / "artifact"))


def inspect(folder: Path) -> None:
    show(folder, read_manifest(folder), Console(file=io.StringIO()))


def test_an_empty_field_of_earlier_versions(artifact: Path) -> None:
    engine = {"module": "tensorrt", "version": "10.0", "archs": [], "profiles": []}
    write(artifact, fields_of(artifact) | {"engine": engine | {"refit": []}})
    assert read_manifest(artifact).engine is not None
    write(artifact, fields_of(artifact) | {"engine": engine | {"refit": ["a"]}})
    with pytest.raises(ArtifactError, match=r"engine\.refit: expected no field of this name"):
        read_manifest(artifact)


@pytest.mark.parametrize(
    ("name", "extents", "message"),
    [
        ("min", {}, r"engine\.profiles\[0\]\.min: expected an extent of 'batch_size', got none"),
        (
            "min",
            {"batch_size": 9},
            "batch_size: expected min <= opt <= max from 0 to .*, got 9, 2 ",
        ),
        ("max", {"batch_size": 1 << 70}, "batch_size: expected min <= opt <= max from 0 to 21474"),
    ],
)
def test_a_profile_that_is_not_whole(
    artifact: Path, name: str, extents: dict[str, int], message: str
) -> None:
    fields = fields_of(artifact)
    dims = {split_dim(dim)[0]: 2 for each in fields["inputs"] for dim in each["dims"]}
    profile: dict[str, Any] = {each: dict(dims) for each in ("min", "opt", "max")}
    engine = {"module": "tensorrt", "version": "10.0", "archs": [], "profiles": [profile]}
    write(artifact, fields | {"engine": engine | {"profiles": [profile | {"name": "decode"}]}})
    read_manifest(artifact)
    profile |= {"name": "decode", name: dims | extents if extents else {}}
    write(artifact, fields | {"engine": engine})
    for read in (kvgraph.load, verify, inspect):
        with pytest.raises(ArtifactError, match=message):
            read(artifact)


@pytest.mark.parametrize("text", ["a\nb", "a\x1b[2J", "a\udcff"])
def test_what_no_reader_takes_is_not_written(artifact: Path, text: str) -> None:
    before = (artifact / "manifest.json").read_bytes()
    manifest = read_manifest(artifact)
    message = r"manifest\.json: expected text without control characters, in UTF-8, got 'a\\"
    with pytest.raises(ArtifactError, match=message):
        write_manifest(artifact, replace(manifest, notes=[text]))
    assert (artifact / "manifest.json").read_bytes() == before


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"max_seq_len": 1 << 31}, "max_seq_len: expected <= 2147483647, got 2147483648"),
        ({"eos_token_ids": [1 << 32]}, "eos_token_ids: expected an id of 32 bits, got 4294967296"),
        ({"bos_token_id": -1 << 31}, "bos_token_id: expected an id of 32 bits, got -2147483648"),
    ],
)
def test_values_that_no_reader_takes_are_not_written(
    change: dict[str, Any], message: str, artifact: Path
) -> None:
    before = (artifact / "manifest.json").read_bytes()
    manifest = read_manifest(artifact)
    with pytest.raises(ArtifactError, match=rf"manifest\.json: model\.{re.escape(message)}$"):
        write_manifest(artifact, replace(manifest, model=replace(manifest.model, **change)))
    assert (artifact / "manifest.json").read_bytes() == before


@pytest.mark.parametrize("model", ["tiny-llama", "gemma2"])
def test_any_field_of_another_kind(model: str, compiled: Compiled, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(compiled(model), tmp_path / "artifact"))
    whole = fields_of(folder)
    rng = random.Random(model)
    refused = 0
    places = list(ways(whole))
    for _ in range(MUTATIONS):
        *way, last = rng.choice(places)
        fields = copy.deepcopy(whole)
        place: Any = fields
        for key in way:
            place = place[key]
        place[last] = rng.choice(OTHER_KINDS)
        write(folder, fields)
        for read in (kvgraph.load, verify, inspect):
            try:
                read(folder)
            except KVGraphError as error:
                refused += 1
                assert "\n" not in str(error)
    assert MUTATIONS < refused < 3 * MUTATIONS


@pytest.mark.parametrize(
    ("way", "value", "message"),
    [
        (("layout", "n_kv_heads"), None, "layout.n_kv_heads: expected int, got None"),
        (
            ("layout", "quantization"),
            1,
            "layout.quantization: expected Quantization or null, got 1",
        ),
        (
            ("layout", "quantization"),
            {"dtype": "int8"},
            "layout.quantization: expected Quantization",
        ),
        (("layout", "flavour"), 1, "layout: expected fields of a cache, got another .*'flavour'"),
        (("layout", "head_dim"), -1, "head_dim: expected >= 1, got -1"),
        (("layout",), {"a": {"b": 1}}, r"layout\.a\.b: expected a cache, got 1"),
        (("layout",), {}, r"layout: expected a cache, got {}"),
        (("files", "model.onnx", "chunks"), [], r"files.model.onnx: expected 1 chunks for \d+ byt"),
        (("files", "model.onnx", "size"), -1, r"files.model.onnx: expected 0 chunks for -1 bytes"),
        (("model", "identity"), "", "model.identity: expected a SHA-256 of 64 hex digits, got ''"),
        (("model", "identity"), "no hex", "model.identity: .* of 64 hex digits, got 'no hex'"),
        (("files", "model.onnx", "chunks"), ["a"], r"model.onnx.chunks\[0\]: .* digits, got 'a'"),
        (("model", "max_seq_len"), 0, "model.max_seq_len: expected >= 1, got 0"),
        (("model", "vocab_size"), -1, "model.vocab_size: expected >= 1, got -1"),
        (("model", "max_seq_len"), 1 << 70, r"model.max_seq_len: expected <= 2147483647, got 118"),
        (("model", "bos_token_id"), 1 << 70, "model.bos_token_id: expected an id of 32 bits, got "),
        (("model", "eos_token_ids"), [1 << 70], "model.eos_token_ids: expected an id of 32 bits"),
    ],
)
def test_values_that_no_compile_writes(
    artifact: Path, way: tuple[str, ...], value: Any, message: str
) -> None:
    fields = fields_of(artifact)
    place: Any = fields
    for key in way[:-1]:
        place = place[key]
    place[way[-1]] = value
    write(artifact, fields)
    for read in (kvgraph.load, verify):
        with pytest.raises(ArtifactError, match=message):
            read(artifact)


KERNEL: dict[str, Any] = {
    "kernel": "store_kv", "role": "", "arch": "sm_90", "file": "a.cubin", "num_warps": 4,
    "registers": 32, "shared": 0, "spill_stores": 0, "spill_loads": 0,
}  # fmt: skip


@pytest.mark.parametrize(
    ("content", "shown"),
    [
        (json.dumps([KERNEL]), True),
        (json.dumps([KERNEL | {"num_warps": "4"}]), False),
        (json.dumps([{}]), False),
        ("{}", False),
        ("[1]", False),
        ("nothing", False),
        (None, False),
    ],
)
def test_inspect_reads_kernels_that_no_hash_protects(
    artifact: Path, content: str | None, shown: bool
) -> None:
    """What a build took is of no account: a damaged log is not shown."""
    fields, path = fields_of(artifact), artifact / "kernels/sm_90/kernels.json"
    path.parent.mkdir(parents=True)
    if content is None:
        os.mkfifo(path)
    else:
        path.write_text(content)
    fields["files"]["kernels/sm_90/kernels.json"] = {"size": 0, "chunks": []}
    (artifact / "build.json").write_text('{"compile_seconds": {"kernels/sm_90/a.cubin": "long"}}')
    write(artifact, fields)
    outcome = run("inspect", artifact)
    if shown:
        assert outcome.code in (0, None)
        assert "store_kv" in outcome.out
    else:
        assert outcome.code == 2
        assert outcome.err.startswith(f"kvgraph: {path}: expected a list of kernels, got a damaged")
        assert outcome.out == ""


@pytest.mark.parametrize(("cache", "pages"), [("paged", True), ("continuous", False)])
def test_inspect_shows_the_pages_of_a_cache_that_has_them(
    cache: str, pages: bool, compiled: Compiled
) -> None:
    shown = run("inspect", compiled("tiny-llama", cache=cache)).out
    assert ("tokens a page" in shown) == pages
    assert f"float32 {cache}: 4 layers x 4 kv heads x 16" in " ".join(shown.split())


QUALITY = {"text": "t", "sha256": "ab" * 32, "tokens": 1, "perplexity": 2.0,
           "reference_perplexity": 2.0, "agreement": 1.0}  # fmt: skip
MIXTURE = {"layers": 1, "experts": 4, "active": 2, "parameters": 9, "bytes": 9}
COLLECTIVE = {"op": "all_reduce", "count": 1, "rows": "tokens", "bytes": 4}
EXECUTED = {"file": "a", "steps": 1, "sectors": 1, "ideal_sectors": 1, "wavefronts": 0,
            "ideal_wavefronts": 0}  # fmt: skip


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"quality": QUALITY | {"reference_perplexity": 0}},
         "quality.reference_perplexity: expected a number > 0, got 0.0"),
        ({"quality": QUALITY | {"perplexity": float("nan")}},
         "quality.perplexity: expected a number > 0, got nan"),
        ({"quality": QUALITY | {"perplexity": float("inf")}},
         "quality.perplexity: expected a number > 0, got inf"),
        ({"quality": QUALITY | {"agreement": -7.0}},
         "quality.agreement: expected 0 to 1, got -7.0"),
        ({"quality": QUALITY | {"agreement": float("nan")}},
         "quality.agreement: expected 0 to 1, got nan"),
        ({"quality": QUALITY | {"tokens": -1}}, "quality.tokens: expected >= 1, got -1"),
        ({"quality": QUALITY | {"sha256": "zz"}}, "quality.sha256: expected a SHA-256 of 64"),
        ({"mixtures": [MIXTURE | {"layers": 0}]},
         "mixtures[0].layers: expected 1 to 2**63 - 1, got 0"),
        ({"mixtures": [MIXTURE | {"experts": 0, "active": 0}]},
         "mixtures[0].experts: expected 1 to 2**63 - 1, got 0"),
        ({"mixtures": [MIXTURE | {"active": 5}]},
         "mixtures[0].active: expected 0 to 4 experts, got 5"),
        ({"mixtures": [MIXTURE | {"parameters": 0}]},
         "mixtures[0].parameters: expected 1 to 2**63 - 1, got 0"),
        ({"collectives": [COLLECTIVE | {"count": 0}]},
         "collectives[0].count: expected 1 to 2**63 - 1, got 0"),
        ({"executed": [EXECUTED | {"steps": 0}]},
         "executed[0].steps: expected 1 to 2**63 - 1, got 0"),
        ({"passes": [{"name": "a", "applied": -1}]},
         "passes[0].applied: expected 0 to 2**63 - 1, got -1"),
    ],
)  # fmt: skip
def test_figures_that_no_compile_or_measurement_writes(
    artifact: Path, change: dict[str, object], sentence: str
) -> None:
    fields = fields_of(artifact)
    write(artifact, fields | {"quality": QUALITY, "mixtures": [MIXTURE], "executed": [EXECUTED]})
    assert run("inspect", artifact).code in (0, None)
    write(artifact, fields | change)
    outcome = run("inspect", artifact)
    assert outcome.code == 2
    assert sentence in outcome.err


def test_a_read_only_folder_is_refused_before_kernels_run(artifact: Path) -> None:
    artifact.chmod(0o555)
    with another_user(artifact):
        found = run("verify", artifact, "--execute", "--record")
    artifact.chmod(0o755)
    assert found.code == 2
    assert found.out == ""
    assert found.err == (
        f"kvgraph: {artifact}: expected a folder that can be written to for --record, got a "
        "read-only one; copy it, or leave --record out\n"
    )
