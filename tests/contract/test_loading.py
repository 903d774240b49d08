"""Errors for packages and libraries that cannot be loaded."""

from __future__ import annotations

import errno
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

import kvgraph.onnx
import kvgraph.ops
from kvgraph.contract.loading import next_step, require_package, unimportable
from kvgraph.contract.symbols import emit_onnx, emit_torch_export
from kvgraph.errors import MissingDependencyError


@pytest.mark.parametrize(
    ("why", "step"),
    [
        ("failed to map segment from shared object", r"`ulimit -v`.* noexec"),
        (os.strerror(errno.ENOMEM), "`ulimit -v`"),
        ("std::bad_alloc", "`ulimit -v`"),
        ("can't register atexit after shutdown", "before the main thread ends"),
        (os.strerror(errno.EMFILE), "`ulimit -n`"),
        (os.strerror(errno.ENFILE), r"fs\.file-max"),
        (os.strerror(errno.EFBIG), "`ulimit -f`"),
        (os.strerror(errno.EACCES), "chmod"),
        ("invalid ELF header", "install it again"),
    ],
)
def test_the_next_step_is_that_of_the_cause(why: str, step: str) -> None:
    text = next_step(f"a.so: {why}", "install it again")
    assert re.search(step, text)
    assert ("install" in text) == ("install" in step)


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (
            ModuleNotFoundError("no", name="torch"),
            "torch: needed here, not installed; pip install x",
        ),
        (
            ModuleNotFoundError("no", name="sympy"),
            r"torch: needed here, installed, and .*'no'.*; pip install --upgrade x",
        ),
        (
            ImportError("libc10.so: failed to map segment from shared object"),
            r"torch: needed here, installed, and .*; raise the limit of memory .*",
        ),
    ],
)
def test_a_package_that_cannot_be_imported(error: Exception, message: str) -> None:
    assert re.fullmatch(message, str(unimportable("torch", "needed here", error, "pip install x")))


@pytest.mark.parametrize(
    ("module", "package", "code", "message"),
    [
        ("absent_one", "", None, "absent_one: needed here, not installed; pip install x"),
        ("absent_one.part", "", None, "absent_one: needed here, not installed; pip install x"),
        ("absent_one", "absent-1", None, "absent-1: needed here, not installed; pip install x"),
        (
            "broken_one",
            "broken-1",
            "raise ImportError('other>=2 is required')",
            r"broken-1: needed here, installed, and .*other>=2.*; pip install --upgrade x",
        ),
        (
            "broken_two",
            "",
            "raise RuntimeError('not this NumPy')",
            r"broken_two: needed here, installed, and .*not this NumPy.*; pip install --upgrade x",
        ),
    ],
)
def test_a_package_that_is_needed(
    module: str,
    package: str,
    code: str | None,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if code is not None:
        (tmp_path / f"{module}.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(MissingDependencyError) as refused:
        require_package(module, "needed here", "pip install x", package)
    assert re.fullmatch(message, str(refused.value))


def test_memory_that_an_import_lacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "large_one.py").write_text("raise MemoryError")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(MemoryError):
        require_package("large_one", "needed here", "pip install x")


NEEDS: dict[str, tuple[str, Callable[[], object]]] = {
    "kvgraph.ops.linear": ("torch", lambda: kvgraph.ops.linear),
    "kvgraph.ops.store_kv": ("torch", lambda: kvgraph.ops.store_kv),
    "kvgraph.onnx.lower_caches": ("torch", lambda: kvgraph.onnx.lower_caches(None)),  # type: ignore[arg-type]
    "kvgraph.onnx.translation_table": ("onnxscript", kvgraph.onnx.translation_table),
    "kvgraph.onnx.register_schemas": ("onnx", kvgraph.onnx.register_schemas),
    "arguments of torch.export": ("torch", lambda: emit_torch_export([])),
    "values of ONNX": ("onnx", lambda: emit_onnx([])),
}


@pytest.mark.parametrize("what", NEEDS)
def test_a_public_function_without_its_package(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    package, call = NEEDS[what]
    for module in ("torch", "onnx", "onnxscript"):
        if module == package:
            monkeypatch.setitem(sys.modules, module, None)
        else:
            monkeypatch.setitem(sys.modules, module, ModuleType(module))
    message = f"{package}: needed for {what}, not installed; pip install 'kvgraph[compile]'"
    with pytest.raises(MissingDependencyError, match=f"^{re.escape(message)}$"):
        call()
