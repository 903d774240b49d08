"""Where a program runs: a working folder that changes, an artifact that is exchanged, forks."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import kvgraph
from kvgraph import AsyncEngine, Engine, SamplingParams
from kvgraph.contract.hashes import FileEntry
from kvgraph.errors import ArtifactError
from kvgraph.runtime import machine
from kvgraph.runtime.artifact import Artifact
from kvgraph.runtime.sessions import base
from tests.support.artifacts import Compiled

FEW = SamplingParams(max_new_tokens=4, ignore_eos=True)
PROMPT = [[*range(3, 40)]]
WEIGHTS = "weights.safetensors"
OVERWRITTEN = rf"{WEIGHTS}: expected the file as the session opened it, got .* by rename$"
ANOTHER = "expected the artifact that was loaded, got another one in its place; load it again"


@pytest.fixture
def folder(compiled: Compiled, tmp_path: Path) -> Path:
    return shutil.copytree(compiled("llama"), tmp_path / "served.kvg")


def exchange(folder: Path, other: Path) -> None:
    """As a compile with `force` does, and a deployment by rename."""
    folder.rename(folder.with_name("old"))
    shutil.copytree(other, folder)


@pytest.mark.parametrize("backend", ["onnx", "torch"])
def test_an_artifact_that_is_exchanged_is_refused(
    backend: str, compiled: Compiled, tmp_path: Path
) -> None:
    """Its pages would be found under the identity of the one before it."""
    folder = shutil.copytree(compiled("llama", backend), tmp_path / "served.kvg")
    loaded = kvgraph.load(folder)
    exchange(folder, compiled("qwen3", backend))
    with pytest.raises(ArtifactError, match=ANOTHER):
        Engine(loaded)
    with pytest.raises(ArtifactError, match=ANOTHER):
        loaded.session()
    with Engine(folder) as engine:
        assert len(engine.generate(PROMPT, FEW)[0].token_ids) == 4


def test_an_artifact_that_is_gone_is_refused(folder: Path) -> None:
    loaded = kvgraph.load(folder)
    shutil.rmtree(folder)
    with pytest.raises(ArtifactError, match=ANOTHER.replace("another one", "none")):
        Engine(loaded)


def test_an_equal_artifact_is_taken(folder: Path, compiled: Compiled) -> None:
    """Files that are copied again, or touched, say the same."""
    loaded = kvgraph.load(folder)
    os.utime(folder / "manifest.json")
    Engine(loaded).close()
    exchange(folder, compiled("llama"))
    Engine(loaded).close()


def edit(file: Path) -> None:
    """Other bytes in the same inode, as `cp` and `rsync --inplace` write them; the size stays."""
    with file.open("r+b") as opened:
        opened.seek(file.stat().st_size // 2)
        opened.write(b"\x3f" * 4096)


def edit_and_keep_time(file: Path) -> None:
    """As `cp -p` of a file of the same time."""
    before = file.stat()
    edit(file)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))


def cut(file: Path) -> None:
    os.truncate(file, 1000)


@pytest.mark.parametrize("change", [edit, cut])
@pytest.mark.parametrize(
    ("backend", "name"),
    [
        ("onnx", WEIGHTS),
        ("onnx", "model.onnx"),
        ("onnx", "tokenizer.json"),
        ("torch", WEIGHTS),
        ("torch", "model.pt2"),
    ],
)
def test_a_file_that_is_changed_after_it_was_loaded_is_refused(
    backend: str, name: str, change: Callable[[Path], None], compiled: Compiled, tmp_path: Path
) -> None:
    folder = shutil.copytree(compiled("tiny-llama", backend), tmp_path / "served.kvg")
    loaded = kvgraph.load(folder)
    change(folder / name)
    for open_it in (Engine, Artifact.session):
        with pytest.raises(ArtifactError, match=rf"^{folder / name}: .*expected .* manifest, got"):
            open_it(loaded)


def remove(folder: Path, _: Path) -> None:
    shutil.rmtree(folder)


def touch_no_byte(folder: Path, _: Path) -> None:
    (folder / WEIGHTS).chmod(0o400)
    (folder / "link").hardlink_to(folder / WEIGHTS)


@pytest.mark.parametrize("change", [exchange, remove, touch_no_byte])
@pytest.mark.parametrize("backend", ["onnx", "torch"])
def test_a_running_engine_keeps_its_artifact(
    backend: str, change: Callable[[Path, Path], None], compiled: Compiled, tmp_path: Path
) -> None:
    folder = shutil.copytree(compiled("llama", backend), tmp_path / "served.kvg")
    with Engine(folder) as engine:
        before = engine.generate(PROMPT, FEW)[0].token_ids
        change(folder, compiled("qwen3", backend))
        assert engine.generate(PROMPT, FEW)[0].token_ids == before


@pytest.mark.parametrize("change", [edit, edit_and_keep_time, cut])
@pytest.mark.parametrize("backend", ["onnx", "torch"])
def test_an_engine_whose_weights_are_overwritten_says_so(
    backend: str, change: Callable[[Path], None], compiled: Compiled, tmp_path: Path
) -> None:
    folder = shutil.copytree(compiled("llama", backend), tmp_path / "served.kvg")
    with Engine(folder) as engine:
        engine.generate(PROMPT, FEW)
        change(folder / WEIGHTS)
        for _ in range(2):
            with pytest.raises(ArtifactError, match=OVERWRITTEN):
                engine.generate(PROMPT, FEW)
        with pytest.raises(ArtifactError, match=OVERWRITTEN):
            engine.submit(PROMPT[0], FEW)


def test_weights_are_hashed_once_for_each_change_time(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor again once they are refused."""
    found: list[bool] = []
    is_intact = base.is_intact

    def noted(file: int, entry: FileEntry) -> bool:
        found.append(is_intact(file, entry))
        return found[-1]

    monkeypatch.setattr(base, "is_intact", noted)
    with Engine(folder) as engine:
        before = engine.generate(PROMPT, FEW)[0].token_ids
        assert found == []
        for mode in (0o640, 0o600):
            (folder / WEIGHTS).chmod(mode)
            assert engine.generate(PROMPT, FEW)[0].token_ids == before
        assert found == [True, True]
        edit_and_keep_time(folder / WEIGHTS)
        for _ in range(2):
            with pytest.raises(ArtifactError, match=OVERWRITTEN):
                engine.generate(PROMPT, FEW)
    assert found == [True, True, False]


@pytest.mark.parametrize("change", [exchange, remove])
def test_weights_without_a_name_are_not_hashed(
    change: Callable[[Path, Path], None],
    folder: Path,
    compiled: Compiled,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Replacing an artifact by rename costs its engine nothing."""
    monkeypatch.setattr(base, "is_intact", lambda *_: pytest.fail("hashed"))
    with Engine(folder) as engine:
        before = engine.generate(PROMPT, FEW)[0].token_ids
        change(folder, compiled("qwen3", "onnx"))
        assert engine.generate(PROMPT, FEW)[0].token_ids == before


def test_pages_of_other_weights_reach_no_tier(folder: Path, tmp_path: Path) -> None:
    """A later engine would take them for its own."""
    intact = shutil.copytree(folder, tmp_path / "intact.kvg")
    disk = tmp_path / "pages"
    with Engine(intact) as engine:
        expected = engine.generate(PROMPT, FEW)[0].token_ids
    with Engine(folder, disk=disk) as engine:
        engine.submit(PROMPT[0], FEW)
        edit(folder / WEIGHTS)
        with pytest.raises(ArtifactError, match=OVERWRITTEN):
            engine.step()
    with Engine(intact, disk=disk) as engine:
        done = engine.generate(PROMPT, FEW)[0]
        assert (done.token_ids, done.cached_tokens) == (expected, 0)


def test_an_async_engine_whose_weights_are_overwritten_ends(folder: Path) -> None:
    async def main() -> None:
        async with AsyncEngine(Engine(folder)) as engine:
            await engine.generate(PROMPT[0], FEW)
            edit(folder / WEIGHTS)
            done = await engine.generate(PROMPT[0], FEW)
            assert re.search(OVERWRITTEN, str(done.error))
            assert engine.is_closed

    asyncio.run(main())


def test_a_working_folder_that_changes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As of a program that becomes a daemon."""
    monkeypatch.chdir(folder.parent)
    loaded = kvgraph.load(folder.name)
    monkeypatch.chdir("/")
    with Engine(loaded) as engine:
        assert len(engine.generate(PROMPT, FEW)[0].token_ids) == 4


@pytest.mark.parametrize(
    ("own", "files", "threads"),
    [
        ("0::/", {"cpu.max": "150000 100000"}, 2),
        ("0::/", {"cpu.max": "max 100000"}, None),
        ("0::/", {"cpu.max": "900000 100000"}, None),
        ("0::/a/b", {"a/cpu.max": "50000 100000", "cpu.max": "max 100000"}, 1),
        ("0::/a/b", {"a/b/cpu.max": "200000 100000", "a/cpu.max": "100000 100000"}, 1),
        ("0::/of/the/host", {"cpu.max": "200000 100000"}, 2),
        (
            "4:memory:/a\n3:cpu,cpuacct:/a\n0::/",
            {"cpu/a/cpu.cfs_quota_us": "100000", "cpu/a/cpu.cfs_period_us": "50000"},
            2,
        ),
        ("3:cpu:/", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, None),
        ("3:cpu:/", {"cpu/cpu.cfs_quota_us": "x"}, None),
        ("", {}, None),
    ],
)
def test_threads_of_a_container(
    own: str,
    files: dict[str, str],
    threads: int | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(machine, "processors", lambda: [0, 1, 2, 3])
    for name, text in files.items():
        (tmp_path / "cgroup" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "cgroup" / name).write_text(f"{text}\n")
    (tmp_path / "own").write_text(f"{own}\n")
    assert machine.quota_threads(tmp_path / "cgroup", tmp_path / "own") == threads
    assert machine.quota_threads(tmp_path / "none", tmp_path / "none") is None


def test_a_close_that_is_left_breaks_no_other(folder: Path) -> None:
    long = SamplingParams(max_new_tokens=800, ignore_eos=True)

    async def main() -> None:
        engine = AsyncEngine(Engine(folder))
        await engine.start()
        tasks = [asyncio.create_task(engine.generate(PROMPT[0], long)) for _ in range(8)]
        while not engine.engine.generated_tokens:
            await asyncio.sleep(0.001)
        left, other = (asyncio.create_task(engine.close()) for _ in range(2))
        await asyncio.sleep(0)
        left.cancel()
        found = await asyncio.gather(left, other, return_exceptions=True)
        assert isinstance(found[0], asyncio.CancelledError)
        assert found[1] is None
        await engine.close()
        await asyncio.gather(*tasks)

    asyncio.run(main())


FORKED = """
import os, sys, warnings
import kvgraph

warnings.simplefilter("ignore")
folder, model = sys.argv[1:]
few, prompt = kvgraph.SamplingParams(max_new_tokens=4, ignore_eos=True), [[*range(3, 40)]]
{before}
if not (child := os.fork()):
    {child}
    os._exit(7)
print(os.waitpid(child, 0)[1] >> 8)
"""
ENGINE = "expected = kvgraph.Engine(folder).generate(prompt, few)[0].token_ids"
OWN = "import torch; torch.rand(2000, 2000) @ torch.rand(2000, 2000)\n"
ENGINE_THERE = """
import subprocess
there = '''
import sys, kvgraph
few, prompt = kvgraph.SamplingParams(max_new_tokens=4, ignore_eos=True), [[*range(3, 40)]]
print(list(kvgraph.Engine(sys.argv[1]).generate(prompt, few)[0].token_ids))
'''
command = [sys.executable, "-c", there, folder]
expected = eval(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
"""
OPEN = "engine = kvgraph.Engine(folder); expected = engine.generate(prompt, few)[0].token_ids"
REFUSED = """
    for call in (engine.step, lambda: engine.generate(prompt), lambda: next(engine.stream([5]))):
        try:
            call()
        except kvgraph.RequestError as error:
            assert "expected the process that opened it, got a fork of it; open" in str(error)
        else:
            raise AssertionError(call)
    engine.close()
    assert kvgraph.Engine(folder, num_threads=1).generate(prompt, few)[0].token_ids == expected
"""
SAME = "assert kvgraph.Engine(folder).generate(prompt, few)[0].token_ids == expected"
MORE = """
    try:
        kvgraph.Engine(folder, num_threads=2)
    except kvgraph.UnsupportedError as error:
        assert "expected 1 in a fork of a process in which torch has computed, got 2" in str(error)
"""
COMPILE = "kvgraph.compile(model, f'{folder}.made', force=True, check=False)"


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one thread needs no other")
@pytest.mark.parametrize(
    ("backend", "before", "child"),
    [
        ("onnx", ENGINE, SAME),
        ("torch", ENGINE, SAME),
        ("torch", ENGINE, MORE),
        ("torch", OWN + ENGINE_THERE, SAME),
        ("onnx", OPEN, REFUSED),
        ("torch", OPEN, REFUSED),
        ("onnx", COMPILE, COMPILE),
    ],
    ids=["onnx", "torch", "more threads", "torch of its own", "its", "its torch", "compile"],
)
def test_a_forked_child_does_as_its_parent(
    backend: str,
    before: str,
    child: str,
    compiled: Compiled,
    model_folder: Callable[[str], Path],
    tmp_path: Path,
) -> None:
    folder = shutil.copytree(compiled("llama", backend), tmp_path / "x.kvg")
    program = FORKED.format(before=before, child=child)
    command = [sys.executable, "-c", program, str(folder), str(model_folder("llama"))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert (done.returncode, done.stdout.splitlines()[-1:]) == (0, ["7"]), done.stderr
