"""Memory that runs out while tasks run, on our threads or a host's: one sentence, and the next call
is right."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from kvgraph.ops.native import library_path
from tests.plugins.hosts import HERE, PLUGINS

SENTENCE = "memory: expected enough for this call, got no more from the system"


def test_memory_that_runs_out_in_a_task(tmp_path: Path) -> None:
    compiler = next((c for c in ("c++", "g++", "clang++") if shutil.which(c)), None)
    if compiler is None:
        pytest.skip("no C++ compiler to build the caller with")
    library = library_path("cpu")
    made = tmp_path / "caller"
    subprocess.run(
        [compiler, "-std=c++17", "-Wall", "-Wextra", "-Werror", f"-I{PLUGINS / 'include'}",
         str(HERE / "memory_host.cpp"), str(library), f"-Wl,-rpath,{library.parent}", "-pthread",
         "-o", str(made)],
        check=True,
    )  # fmt: skip
    done = subprocess.run([str(made)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    expected = []
    for name in ("sample", "punish", "store", "threads: store", "attend", "threads: attend"):
        expected += [f"{name}: 2 {SENTENCE}", f"{name}: 0 "]
    assert done.stdout.splitlines() == [*expected, "token: 999"]
