"""Threads of one process compile one after the other, and a forked child does not wait for them."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

import kvgraph
from kvgraph import onnx
from kvgraph.compiler import alone, plan
from kvgraph.compiler.targets.tensorrt import torch_tensorrt
from kvgraph.quality import reference
from tests.support.artifacts import TINY_LLAMA


def test_two_threads_make_the_artifact_of_one(tmp_path: Path) -> None:
    raised: list[BaseException] = []

    def run(name: str) -> None:
        try:
            kvgraph.compile(TINY_LLAMA, tmp_path / name)
        except BaseException as error:
            raised.append(error)

    run("one")
    threads = [threading.Thread(target=run, args=(name,)) for name in ("a", "b")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert raised == []
    assert contents(tmp_path / "a") == contents(tmp_path / "one")
    assert contents(tmp_path / "b") == contents(tmp_path / "one")


def contents(folder: Path) -> dict[str, bytes]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


PROGRAM = SimpleNamespace()
DESCRIBER = plan._Describer(Path("m"), {}, "float32", False, lambda stage: None)
ENTRIES: dict[str, tuple[object, str, Callable[[], object]]] = {
    "kvgraph.onnx": (onnx, "_require", lambda: onnx.lower_caches(PROGRAM)),  # type: ignore[arg-type]
    "torch-tensorrt": (
        torch_tensorrt,
        "without_writes",
        lambda: torch_tensorrt.lower_caches(PROGRAM),  # type: ignore[arg-type]
    ),
    "plan": (plan, "require_package", lambda: DESCRIBER._ask("it is tested", 1)),
    "quality": (reference, "_scores", lambda: reference.score_reference(Path("m"), [])),
}


@pytest.mark.parametrize("name", ENTRIES)
def test_other_entries_hold_the_lock_too(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class ReachedError(Exception):
        pass

    def reached(*given: object) -> None:
        held.append(is_held())
        raise ReachedError

    held: list[bool] = []
    module, inner, call = ENTRIES[name]
    monkeypatch.setattr(module, inner, reached)
    with pytest.raises(ReachedError):
        call()
    assert held == [True]
    assert not is_held()


def is_held() -> bool:
    """Whether another thread would wait."""
    found: list[bool] = []

    def look() -> None:
        lock = cast("threading._RLock", alone.alone())
        if lock.acquire(blocking=False):
            lock.release()
        else:
            found.append(True)

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    return bool(found)


def test_a_scope_in_another_one_does_not_wait_and_an_interrupt_ends_both() -> None:
    def interrupted() -> None:
        with alone.alone(), alone.alone():
            held.append(is_held())
            raise KeyboardInterrupt

    held: list[bool] = []
    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert held == [True]
    assert not is_held()


FORK = """
import os, threading
from kvgraph.compiler.alone import alone

taken, done = threading.Event(), threading.Event()

def hold():
    with alone():
        taken.set()
        done.wait()

threading.Thread(target=hold, daemon=True).start()
taken.wait()
child = os.fork()
if child == 0:
    os._exit(7 if alone().acquire(timeout=5) else 1)
code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
waits = not alone().acquire(blocking=False)
done.set()
print(code, waits)
"""


def test_a_forked_child_does_not_wait_for_a_thread_of_its_parent() -> None:
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FORK], capture_output=True, text=True, check=True
    )
    assert ran.stdout == "7 True\n"
