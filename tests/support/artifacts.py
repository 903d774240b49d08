"""Models and artifacts that tests share, in every process and every run: kept by what makes them.

    build/tests/<digest of sources and versions>/<digest of model and options>/

A folder is made once, under a lock, and appears whole; a change of any source that compiling reads
begins a new one, and removes those before it. `rm -r build/tests` makes all of them again.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.metadata
import json
import platform
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from kvgraph.contract.hashes import hash_files
from kvgraph.contract.plain import to_json

Compiled = Callable[..., Path]
"""The fixture `compiled`: a model, a backend and options -> an artifact's folder."""

ROOT = Path(__file__).parents[2]
STORE = ROOT / "build" / "tests"
CHECKED = (
    "check: logits of two ragged rows, in chunks and in a step of one token, are the model's own, "
    "all layers"
)
"""Note of a compile whose whole artifact was run."""

TINY_LLAMA = ROOT / "examples" / "tiny-llama"

TOOLS = ("numpy", "onnx", "onnx-ir", "onnxscript", "torch", "transformers", "triton")
NOT_READ = ("runtime", "serve", "bench", "quality", "ptx", "cli", "bars.py", "show.py")
"""Parts of the package that no compile runs, where its check is left out."""


def made(what: dict[str, Any], make: Callable[[Path], object]) -> Path:
    """The folder that `make` makes of `what`, plain data; it is not to be written to."""
    sources = STORE / _sources()
    key = hashlib.sha256(json.dumps(what, sort_keys=True, default=str).encode()).hexdigest()[:16]
    folder = sources / key / what["name"]
    folder.parent.mkdir(parents=True, exist_ok=True)
    with (sources / f"{key}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            partial = folder.with_name("partial")
            shutil.rmtree(partial, ignore_errors=True)
            make(partial)
            partial.rename(folder)
    return folder


def rehash(folder: Path, without: str = "") -> None:
    """The manifest lists every file as it is now, and no file `without`."""
    path = folder / "manifest.json"
    fields = json.loads(path.read_text())
    del fields["sha256"]
    fields["files"].pop(without, None)
    for name in fields["files"]:
        entry = hash_files(folder, [name])[name]
        fields["files"][name] = {"size": entry.size, "chunks": entry.chunks}
    fields["sha256"] = hashlib.sha256(to_json(fields)).hexdigest()
    path.write_bytes(to_json(fields))


def shared(name: str) -> Path:
    """A folder for what is kept by names of its own; of these sources, as `made` has it."""
    folder = STORE / _sources() / name
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def remove_old() -> None:
    """What other sources made."""
    for folder in STORE.glob("*"):
        if folder.name != _sources():
            shutil.rmtree(folder, ignore_errors=True)


@cache
def _sources() -> str:
    digest = hashlib.sha256(f"{platform.python_version()} {_processor()}".encode())
    for name in TOOLS:
        digest.update(f"{name} {_version(name)}\n".encode())
    for path in _read():
        digest.update(f"{path.relative_to(ROOT)}\n".encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def _read() -> list[Path]:
    package = ROOT / "kvgraph"
    code = [p for p in package.rglob("*.py") if p.relative_to(package).parts[0] not in NOT_READ]
    native = [path for path in (ROOT / "plugins").rglob("*") if path.is_file()]
    model = [path for path in TINY_LLAMA.iterdir() if path.is_file()]
    return sorted([*code, *native, *model, Path(__file__).with_name("models.py")])


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "none"


def _processor() -> str:
    """What a compiler may compile for."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line for line in lines if line.startswith("flags")), platform.processor())
