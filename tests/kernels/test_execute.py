"""verify --execute: what it finds in an artifact's kernels, and what it refuses."""

from __future__ import annotations

import gzip
import importlib.util
import json
import os
import shutil
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="compiles the kernels: pip install 'kvgraph[cuda]'")

import kvgraph
from kvgraph.contract.manifest import read_manifest
from kvgraph.errors import ArtifactError, KernelError
from kvgraph.kernels import aot
from kvgraph.kernels.execute import (
    _starts,
    _trials,
    record,
    run_task,
    run_trial,
    tasks_of,
)
from kvgraph.kernels.shapes import AttentionShape, PoolShape
from kvgraph.kernels.stored import StoredKernel, read_kernels
from kvgraph.kernels.trials import Trial, attention_trial, rows_of
from tests.compiler import test_gguf_architectures
from tests.support.command_line import run

DOWN = "experts_down few"
SHAPE = AttentionShape(PoolShape("float16", "float16", 2, 16, 16, 2), 4, 0.25)


@pytest.fixture(scope="module")
def artifact(compiled: Callable[..., Path]) -> Path:
    return compiled("tiny-llama", "torch", target="cuda:sm_80", dtype="float16")


@pytest.fixture
def folder(artifact: Path, tmp_path: Path) -> Path:
    """A copy whose kernels may be damaged."""
    return Path(shutil.copytree(artifact, tmp_path / "copy"))


def test_an_artifact_is_executed(artifact: Path) -> None:
    done = run("verify", artifact, "--execute", "--json")
    assert done.code == 0, done.err
    found = json.loads(done.out)["kernels"]
    titles = {each["title"] for each in found}
    assert {"store_kv", "paged_attention prefill", "paged_attention decode"} <= titles
    assert {"paged_attention decode_split", "merge_parts", "rms_norm", "silu_mul"} <= titles
    assert all(each["error"] <= each["limit"] and each["arch"] == "sm_80" for each in found)


def test_kernels_of_experts_are_executed_together(compiled: Callable[..., Path]) -> None:
    """Those of both sizes of tiles, for both kinds of layers of the artifact."""
    artifact = compiled("gpt_oss", "torch", target="cuda:sm_80", dtype="float16")
    done = run("verify", artifact, "--execute", "--json")
    assert done.code == 0, done.err
    found = {each["title"]: each for each in json.loads(done.out)["kernels"]}
    names = [f"experts_{part} {size}" for part in ("up", "down") for size in ("few", "many")]
    for name in (*names, "route", "sort_slots", "place_tiles", "sum_experts"):
        assert found[name]["error"] <= found[name]["limit"]


@pytest.mark.parametrize("matrices", [["down"], ["gate", "up"]], ids=["down", "up"])
def test_layers_of_experts_with_a_form_each(matrices: list[str], tmp_path: Path) -> None:
    """One product of one layer is in int8, the others in nibbles: all kernels run."""
    kinds = {f"blk.1.ffn_{each}_exps": "Q8_0" for each in matrices}
    _, path = test_gguf_architectures.make("mixtral", tmp_path, "Q4_0", kinds=kinds)
    kvgraph.compile(path, tmp_path / "a", target="cuda:sm_80", dtype="float16", page_size=16)
    done = run("verify", tmp_path / "a", "--execute", "--json")
    assert done.code == 0, done.err
    found = json.loads(done.out)["kernels"]
    files = {each["file"] for each in found if each["title"] in ("experts_up few", DOWN)}
    assert len(files) == 3


def test_what_is_said_of_it_and_kept(artifact: Path, tmp_path: Path) -> None:
    shutil.copytree(artifact, tmp_path / "kept")
    done = run("verify", tmp_path / "kept", "--execute", "--record")
    lines = done.out.splitlines()
    assert "intact" in lines[0]
    assert lines[1].startswith("sm_80: 8 kernels are right, as PTX")
    assert lines[-1].startswith("not shown by this: the machine code that ptxas makes of it")
    manifest = read_manifest(tmp_path / "kept")
    cubins = {name for name in manifest.files if name.endswith(".cubin")}
    assert {each.file for each in manifest.executed} == cubins
    assert all(each.sectors >= each.ideal_sectors > 0 for each in manifest.executed)
    assert manifest.identity == read_manifest(artifact).identity
    assert run("verify", tmp_path / "kept").code == 0
    shown = run("inspect", tmp_path / "kept").out
    assert "shared  spills  sectors  banks" in shown
    assert "sectors" not in run("inspect", artifact).out


def test_nothing_is_kept_of_what_did_not_run(artifact: Path) -> None:
    done = run("verify", artifact, "--record")
    assert (done.code, done.err) == (
        2,
        "kvgraph: --record: expected --execute beside it, got none\n",
    )


def test_what_another_artifact_did_is_not_kept(artifact: Path, tmp_path: Path) -> None:
    shutil.copytree(artifact, tmp_path / "kept")
    other = replace(read_manifest(artifact), dtype="bfloat16")
    with pytest.raises(ArtifactError, match=r"kept: expected the artifact that was measured"):
        record(tmp_path / "kept", other, [])
    assert read_manifest(tmp_path / "kept") == read_manifest(artifact)


def test_ptx_is_small_and_the_same_each_time(artifact: Path) -> None:
    kernels = artifact / "kernels" / "sm_80"
    images = sum(path.stat().st_size for path in kernels.glob("*.cubin"))
    texts = sum(path.stat().st_size for path in kernels.glob("*.ptx.gz"))
    assert 0 < texts <= images / 2
    manifest = json.loads((artifact / "manifest.json").read_bytes())
    assert {f"kernels/sm_80/{path.name}" for path in kernels.glob("*.ptx.gz")} <= set(
        manifest["files"]
    )


def decode_trial() -> Trial:
    return attention_trial(SHAPE, "sm_80", "decode", rows_of(16)["decode"], 1)


def packed(trial: Trial, folder: Path, arch: str = "sm_80") -> dict[str, StoredKernel]:
    """The kernels of a trial's plan as Triton's sources are now, in a new folder."""
    folder.mkdir()
    found = {}
    for made in aot.compile_all([one.variant for one in trial.plan.launches], arch):
        path = folder / made.ptx_name
        path.write_bytes(made.packed_ptx())
        found[made.variant.name] = StoredKernel(
            made.variant, arch, made.entry, made.resources.shared, path
        )
    return found


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("(key_N < high)", "(key_N <= high)"),  # a mask that is off by one
        ("(key_N >= low) & (key_N < high)", "(key_N >= low)"),  # no bounds on the last page
    ],
)
def test_a_wrong_kernel_is_found_and_ptxas_takes_it(
    right: str, wrong: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_trial(decode_trial(), packed(decode_trial(), tmp_path / "right"))
    name = "kvgraph.kernels.paged_attention"
    import_path = Path(aot.__file__).with_name("paged_attention.py")
    source = import_path.read_text()
    assert right in source
    altered = tmp_path / "paged_attention.py"
    altered.write_text(source.replace(right, wrong))
    spec = importlib.util.spec_from_file_location(name, altered)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)
    spec.loader.exec_module(module)
    kernels = packed(decode_trial(), tmp_path / "wrong")
    with pytest.raises(KernelError, match=r"^paged_attention"):
        run_trial(decode_trial(), kernels)


def test_a_plan_that_has_other_kernels_is_refused(tmp_path: Path) -> None:
    other = attention_trial(replace(SHAPE, window=5), "sm_80", "decode", rows_of(16)["decode"])
    with pytest.raises(ArtifactError, match="expected among the artifact's kernels"):
        run_trial(other, packed(decode_trial(), tmp_path / "kernels"))


def edit(folder: Path, change: Callable[[Any], object]) -> None:
    """Change the entries of kernels.json; the hash of the file is as before."""
    path = folder / "kernels" / "sm_80" / "kernels.json"
    entries = json.loads(path.read_bytes())
    path.write_text(json.dumps(change(entries)))


DAMAGED = "expected a list of kernels, got a damaged file"
LISTED = "expected files that the manifest lists, got "
OTHER = "expected a kernel of this version of kvgraph"


@pytest.mark.parametrize(
    ("field", "value", "sentence"),
    [
        *[
            (field, value, DAMAGED)
            for field in ("kernel", "role", "arch", "file", "shared", "absent", "constants")
            for value in (None, [None], ...)
        ],
        ("parameters", 7, DAMAGED),
        ("entry", "store_kv\x1b[2J", DAMAGED),
        ("num_stages", 9, OTHER),
        ("kernel", "later", f"{OTHER}, got one with 'later'; compile it again"),
        ("dtype", "float3", f"{OTHER}, got one with 'float3'; compile it again"),
        ("constants", {}, OTHER),
        ("parameters", [["x", "*T"]], OTHER),
        ("alignment", 1, "got one with other alignment; compile it again"),
        ("entry", "merge_parts", "got one with other entry; compile it again"),
        ("arch", "sm_90", "expected a kernel for sm_80, got one for 'sm_90'"),
        ("shared", 1 << 20, "0 to 166912 bytes of shared memory on sm_80, got 1048576"),
        ("shared", -1, "0 to 166912 bytes of shared memory on sm_80, got -1"),
        ("file", "left.cubin", f"{LISTED}'left.cubin'"),
        ("file", "../../tokenizer.json", f"{LISTED}'../../tokenizer.json'"),
        ("ptx", "/etc/hostname", f"{LISTED}'/etc/hostname'"),
        ("ptx", "kernels.json", OTHER),
        ("ptx", None, "expected its PTX beside it, got an artifact from before artifacts had it"),
        ("ptx", ..., "expected its PTX beside it, got an artifact from before artifacts had it"),
    ],
)
def test_a_damaged_entry_is_refused(folder: Path, field: str, value: object, sentence: str) -> None:
    """`...`: the field is missing."""

    def change(entries: list[dict[str, object]]) -> object:
        first = {key: each for key, each in entries[0].items() if key != field}
        return [first if value is ... else first | {field: value}, *entries[1:]]

    edit(folder, change)
    with pytest.raises(ArtifactError) as raised:
        read_kernels(folder)
    assert sentence in str(raised.value)


@pytest.mark.parametrize("value", [None, 7, {}, [1]])
def test_what_is_no_list_of_kernels_is_refused(folder: Path, value: object) -> None:
    edit(folder, lambda entries: value)
    with pytest.raises(ArtifactError, match=DAMAGED):
        read_kernels(folder)


def test_constants_that_no_kernel_of_this_version_has_are_refused(folder: Path) -> None:
    """The name fits them, as one of another version would."""
    kernel = next(each for each in read_kernels(folder) if each.variant.role == "prefill")
    variant = replace(kernel.variant, constants={"LATER": 1})
    for which in ("decode", "rows"):
        with pytest.raises(ArtifactError, match="expected the constants of a kernel of this ver"):
            list(_trials(replace(kernel, variant=variant), which, {}))
    with pytest.raises(ArtifactError, match=r"got others \(KeyError: 'PAGE_SIZE'\)"):
        tasks_of([replace(kernel, variant=variant)])


def test_only_kernels_of_the_manifest_are_read(folder: Path) -> None:
    found = read_kernels(folder)
    shutil.copytree(folder / "kernels" / "sm_80", folder / "kernels" / "sm_90")
    assert read_kernels(folder) == found


def test_an_artifact_without_kernels_is_refused(compiled: Callable[..., Path]) -> None:
    with pytest.raises(ArtifactError, match="expected kernels to execute in kernels/, got none"):
        read_kernels(compiled("tiny-llama"))


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (lambda data: data[:100], "expected the PTX of store_kv, got "),
        (lambda data: b"", "expected the PTX of store_kv, got "),
        (lambda data: gzip.compress(b"no PTX"), "expected the PTX of store_kv, got PTX: expected"),
        (
            lambda data: gzip.compress(gzip.decompress(data).replace(b"sm_80", b"sm_90a")),
            "expected PTX for sm_80, got one for sm_90a",
        ),
        (
            lambda data: gzip.compress(gzip.decompress(data).replace(b"store_kv", b"other")),
            "expected entry store_kv, got ['other']",
        ),
    ],
)
def test_a_damaged_text_is_refused(
    folder: Path, damage: Callable[[bytes], bytes], sentence: str
) -> None:
    (path,) = (folder / "kernels" / "sm_80").glob("store_kv*.ptx.gz")
    path.write_bytes(damage(path.read_bytes()))
    task = next(task for task in tasks_of(read_kernels(folder)) if task[2] == "decode")
    with pytest.raises(ArtifactError) as raised:
        run_task(task)
    assert sentence in str(raised.value)


def test_each_signal_that_comes_while_workers_start_is_handled(
    request: pytest.FixtureRequest,
) -> None:
    """Behind the scope, the others too where a handler raises."""
    seen: list[int] = []

    def raises(number: int, frame: object) -> None:
        raise SystemExit(number)

    handlers = {signal.SIGTERM: raises, signal.SIGINT: lambda number, frame: seen.append(number)}
    for number, handler in handlers.items():
        request.addfinalizer(partial(signal.signal, number, signal.signal(number, handler)))

    def starts() -> None:
        with _starts():
            for number in handlers:
                os.kill(os.getpid(), number)
            assert seen == []

    with pytest.raises(SystemExit):
        starts()
    assert seen == [signal.SIGINT]
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == set()
