"""The passes of each target: one list, which compile runs, dumps write and inspect prints."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from importlib import metadata
from inspect import signature
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from rich.console import Console

import kvgraph
from kvgraph.cli.show import show
from kvgraph.compiler.passes import PassOptions
from kvgraph.compiler.passes.lists import LOWER_CACHES, PASSES, Pass
from kvgraph.compiler.traced import Traced
from kvgraph.contract.backends import OURS
from kvgraph.contract.manifest import Manifest, read_manifest
from kvgraph.errors import RequestError
from tests.support import command_line

ROOT = Path(__file__).parents[2]
TINY_LLAMA = ROOT / "examples" / "tiny-llama"
FIRST = "# kvgraph: the graph after "


def shown(manifest: Manifest) -> list[str]:
    """The lines of inspect about passes."""
    text = io.StringIO()
    show(Path(), manifest, Console(file=text))
    return [line for line in text.getvalue().splitlines() if line.startswith(("pass ", "check "))]


def snapshot(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in sorted(folder.iterdir())}


# -- the lists


def test_every_backend_of_every_target_has_a_list() -> None:
    assert set(PASSES) == {(kind, each.name) for each in OURS for kind in each.targets}


@pytest.mark.parametrize(
    "each", {p.name: p for passes in (*PASSES.values(), LOWER_CACHES) for p in passes}.values()
)
def test_a_pass_is_given_parts_of_a_traced(each: Pass) -> None:
    known = {*Traced.__dataclass_fields__, *vars(Traced)}
    assert set(signature(each.function).parameters) <= known
    assert each.summary


@pytest.mark.parametrize(
    ("model", "options"),
    [
        ("tiny-llama", {}),
        ("tiny-llama", {"weights": "int4"}),
        ("tiny-llama", {"cache": "padded"}),
        ("tiny-llama", {"backend": "torch", "target": "cuda:sm_90"}),
        ("gemma2", {"backend": "onnx", "target": "cuda:sm_90"}),
    ],
)
def test_compile_runs_the_list(
    model: str, options: dict[str, Any], compiled: Callable[..., Path]
) -> None:
    """All that apply, in order; checks that count nothing are in no manifest."""
    if "target" in options:
        pytest.importorskip("triton", reason="kernels for CUDA are compiled by Triton")
    manifest = read_manifest(compiled(model, **options))
    asked = PassOptions("cache" in options, "weights" in options)
    listed = PASSES[manifest.target.partition(":")[0], manifest.backend]
    assert [entry.name for entry in manifest.passes] == [
        each.name
        for each in listed
        if each.applies(asked) and (not each.is_check or each.name == "require_tokens_apart")
    ]


def test_the_lists_as_a_document() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "kvgraph.compiler.passes"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    parts = done.stdout.split("## ")[1:]
    for (key, passes), part in zip(PASSES.items(), parts, strict=True):
        assert part.startswith("Target {}, backend {}\n".format(*key))
        names = [line.split("`")[1] for line in part.splitlines() if "`" in line]
        assert names == [each.name for each in passes]


# -- inspect


def test_inspect_prints_the_list(compiled: Callable[..., Path]) -> None:
    assert shown(read_manifest(compiled("tiny-llama", cache="padded"))) == [
        "check require_whole_inputs: held",
        "pass pair_complex: 0 places",
        "pass fold_constants: 0 places",
        "check require_positions: held",
        "check require_tokens_apart: 9 places",
        "pass select_rows_early: left out, since the cache is padded",
        "pass fuse_update_and_attend: 0 places",
        "check require_fused: left out, since the cache is padded",
        "check require_stored: held",
        "check require_planned: held",
        "pass fuse_rope: 0 places",
        "pass drop_no_ops: 105 places",
        "pass drop_batch_dim: left out, since the cache is padded",
        "pass fuse_head_norms: 0 places",
        "pass join_all_reduces: left out, since there is one rank",
        "pass fuse_all_reduce: left out, since there is one rank",
        "pass pack_experts: 0 places",
        "pass fuse_router: 0 places",
        "pass pack_linear: left out, since weights are not packed",
        "pass wide_indices: 0 places",
        "pass thread_pool: 0 places",
        "pass tied_projection: 1 places",
        "pass half_tables: left out, since weights are not packed",
    ]


@pytest.mark.parametrize("version", ["0.0.1", "unknown"])
def test_inspect_says_of_another_version_what_its_manifest_says(
    compiled: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    if version == "unknown":
        monkeypatch.setattr(
            metadata, "version", mock.Mock(side_effect=metadata.PackageNotFoundError)
        )
    manifest = replace(read_manifest(compiled("tiny-llama")), kvgraph_version=version)
    names = [entry.name for entry in manifest.passes]
    assert [line.split()[1] for line in shown(manifest)] == [f"{name}:" for name in names]


# -- dumps


def dump(out: Path, folder: Path, **options: Any) -> Manifest:
    return kvgraph.compile(TINY_LLAMA, out, page_size=16, dump_passes=folder, **options)


def test_dumps_show_the_graph_after_each_pass(
    tmp_path: Path, compiled: Callable[..., Path]
) -> None:
    """Of the compile, not of its check; the artifact is as without, and old dumps go."""
    manifest = dump(tmp_path / "out", tmp_path / "dumps", weights="int4", backend="onnx")
    files = snapshot(tmp_path / "dumps")
    steps = [entry.name for entry in manifest.passes if entry.name != "require_tokens_apart"]
    steps.insert(steps.index("tied_projection"), "to_onnx")
    names = [f"{i:02}-{name}" for i, name in enumerate(["export", *steps])]
    assert list(files) == [f"{name}.txt" for name in names]
    for name, text in zip(names, files.values(), strict=True):
        assert text.startswith(f"{FIRST}{name[3:]}\n")
        assert str(ROOT) not in text
    stores = [text.count(" = kvgraph.store_kv") for text in files.values()]
    assert stores == [4, 4, 4, 4, *[0] * (len(steps) - 3)]
    packed = [name for name, text in files.items() if "kvgraph.linear" in text]
    assert packed == [f"{name}.txt" for name in names[names.index("11-pack_linear") :]]
    assert "\nlogits: float[num_logits, 2048]" in files["14-to_onnx.txt"]
    whole = read_manifest(compiled("tiny-llama", weights="int4"))
    assert (manifest.files, manifest.passes) == (whole.files, whole.passes)

    (tmp_path / "dumps" / ".kvgraph-0123456789abcdef.partial").touch()  # that a kill left
    dump(tmp_path / "other", tmp_path / "dumps", backend="onnx", check=False)
    assert len(snapshot(tmp_path / "dumps")) < len(files)


def test_the_last_dump_is_of_the_graph_as_it_is_written(tmp_path: Path) -> None:
    pytest.importorskip("triton", reason="kernels for CUDA are compiled by Triton")
    options = {"backend": "onnx", "target": "cuda:sm_90", "check": False}
    dump(tmp_path / "out", tmp_path / "dumps", **options)
    *_, (name, text) = snapshot(tmp_path / "dumps").items()
    assert name == "10-cast_norms.txt"
    assert text.count("= kvgraph.update_and_attend(") == 4


def test_a_compile_that_is_refused_leaves_the_dumps_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvgraph.compiler.passes import fuse_update_and_attend

    monkeypatch.setattr(fuse_update_and_attend, "_same_cache", lambda store, attend: False)
    with pytest.raises(kvgraph.UnsupportedError, match=r"^fuse_update_and_attend: store_kv of"):
        dump(tmp_path / "out", tmp_path / "dumps")
    assert list(snapshot(tmp_path / "dumps")) == [
        "00-export.txt",
        "01-pair_complex.txt",
        "02-fold_constants.txt",
        "03-select_rows_early.txt",
        "04-fuse_update_and_attend.txt",
    ]


OTHERS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "a file": (
        lambda folder: folder.write_text("mine"),
        r"dumps: expected a folder for dumps of passes, got a file \(kept\)$",
    ),
    "a link": (
        lambda folder: folder.symlink_to(folder.with_name("elsewhere")),
        r"dumps: expected a folder for dumps of passes, got a link \(kept\)$",
    ),
    "another file": (
        lambda folder: (folder.mkdir(), (folder / "00-export.txt").write_text("mine")),
        r"dumps: expected a new folder, .* got one with 00-export.txt \(kept\); give another name$",
    ),
    "a dump and a folder": (
        lambda folder: (
            (folder / "inner").mkdir(parents=True),
            (folder / "00-export.txt").write_text(f"{FIRST}export\n"),
        ),
        r"got one with inner \(kept\); give another name$",
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_a_folder_with_other_files_is_refused_at_once(name: str, tmp_path: Path) -> None:
    make, message = OTHERS[name]
    make(tmp_path / "dumps")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(RequestError, match=message):
        kvgraph.compile("no model is read", tmp_path / "out", dump_passes=tmp_path / "dumps")
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("name", ["out", "out/dumps", "."])
def test_dumps_are_apart_from_the_artifact(name: str, tmp_path: Path) -> None:
    message = r"^dump_passes: expected a folder apart from the artifact .*out, got "
    with pytest.raises(RequestError, match=message):
        kvgraph.compile("no model is read", tmp_path / "out", dump_passes=tmp_path / name)
    with pytest.raises(RequestError, match=r"expected a folder that can be written, got none at "):
        kvgraph.compile("no model is read", tmp_path / "out", dump_passes=tmp_path / "a" / "b")
    assert os.listdir(tmp_path) == []


def test_the_command_line(tmp_path: Path) -> None:
    given = ("compile", TINY_LLAMA, "-o", tmp_path / "out", "--no-check")
    outcome = command_line.run(*given, "--dump-passes", tmp_path / "dumps")
    assert outcome.code == 0, outcome.err
    assert "00-export.txt" in snapshot(tmp_path / "dumps")
    given = ("compile", "--from-artifact", "a", "-o", tmp_path / "b", "--dump-passes", "c")
    sentence = "kvgraph: dump_passes: expected none with --from-artifact, got c"
    outcome = command_line.run(*given)
    assert (outcome.code, outcome.err.strip()) == (2, sentence)
