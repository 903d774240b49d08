"""Deployment needs neither torch nor onnx nor transformers: a wheel in an empty environment."""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[1]

QUICK = ("cmake.build-type=None", "cmake.define.CMAKE_CXX_FLAGS=-O1 -DNDEBUG")
"""Half the time of a release's build."""

PATIENT = {"PIP_RETRIES": "10", "PIP_DEFAULT_TIMEOUT": "60"}
"""Also of the pip that brings what builds the wheel."""

PROBE = """
import importlib.util, json
absent = [n for n in ("torch", "onnx", "transformers") if importlib.util.find_spec(n) is None]
print(json.dumps(absent))
"""

TYPED = """
import pathlib, kvgraph
print((pathlib.Path(kvgraph.__file__).parent / "py.typed").is_file())
"""


def test_generate_without_torch_onnx_transformers(
    tmp_path: Path, compiled: Callable[..., Path]
) -> None:
    environment = tmp_path / "env"
    venv.create(environment, with_pip=False, symlinks=True)
    python = environment / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "-q"]
    build = [f"--config-settings={name}" for name in (f"build-dir={tmp_path / 'build'}", *QUICK)]
    subprocess.run([*pip, *build, f"{ROOT}[onnx]"], check=True, env=os.environ | PATIENT)

    def run(*command: str, stdin: str = "") -> str:
        done = subprocess.run(
            command,
            input=stdin,
            capture_output=True,
            text=True,
            check=True,
            cwd=tmp_path,
            env={"PATH": "", "XDG_CACHE_HOME": str(tmp_path / "cache")},
        )
        return done.stdout

    assert run(str(python), "-c", TYPED).strip() == "True"
    assert run(str(python), "-m", "kvgraph", "--version").startswith("kvgraph ")
    assert run(str(python), "-c", PROBE).strip() == '["torch", "onnx", "transformers"]'
    command = str(environment / "bin" / "kvgraph")
    artifact = str(compiled("tiny-llama"))
    text = run(command, "generate", artifact, "The import statement", "--max-new-tokens", "16")
    assert len(text.split()) >= 5
    answers = run(command, "chat", artifact, "--max-new-tokens", "4", stdin="A class\n" * 2)
    assert answers.count("\n") >= 2
    assert "intact" in run(command, "verify", artifact)

    compiling = (command, "compile", str(tmp_path), "-o", str(tmp_path / "out"))
    refused = subprocess.run(compiling, capture_output=True, text=True, env={"PATH": ""})
    assert refused.returncode == 2
    assert refused.stderr.endswith("pip install 'kvgraph[compile]'\n"), refused.stderr
