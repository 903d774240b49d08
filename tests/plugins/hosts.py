"""Hosts of what plugins/ makes for a runtime: RUNTIME_host.cpp, with a fake driver at its side.

Python that calls one (RUNTIME_host.py) runs in a process of its own, which finds the host's library
at $HOST.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kvgraph.ops.native import library_path
from tests.support.fake_driver import build as build_driver

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
PLUGINS = ROOT / "plugins"

Drive = Callable[..., Any]


@dataclass(frozen=True)
class Host:
    library: Path
    driver: Path

    def run(
        self,
        *arguments: str,
        driver: bool,
        sm: int = 86,
        timeout: float | None = None,
        **environment: str,
    ) -> str:
        """What Python prints for `arguments`; `driver`: where there is the fake one, of an `sm`."""
        given = {**os.environ, "HOST": str(self.library), "FAKE_SM": str(sm), **environment}
        if driver:
            given["LD_LIBRARY_PATH"] = str(self.driver)
        command = [sys.executable, *arguments]
        done = subprocess.run(
            command, cwd=ROOT, env=given, capture_output=True, text=True, timeout=timeout
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def result(self, prelude: str, code: str, **options: Any) -> Any:
        """What `code`, after `prelude`, puts in `result`."""
        script = f"{prelude}\n{code}\nprint(json.dumps(result))"
        return json.loads(self.run("-c", script, timeout=300, **options))


def build(runtime: str, folder: Path) -> Host:
    """The host of `runtime`, in `folder`. Skips without a compiler."""
    compiler = next((c for c in ("c++", "g++", "clang++") if shutil.which(c)), None)
    if compiler is None:
        pytest.skip("no C++ compiler to build the host with")
    library = library_path(runtime)
    made = folder / "host.so"
    subprocess.run(
        [compiler, "-std=c++17", "-shared", "-fPIC", "-Wall", "-Wextra", "-Werror",
         f"-I{PLUGINS}", str(HERE / f"{runtime}_host.cpp"), str(library),
         f"-Wl,-rpath,{library.parent}", "-o", str(made)],
        check=True,
    )  # fmt: skip
    return Host(made, build_driver(folder / "driver"))
