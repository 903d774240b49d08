"""Files that appear whole: a write that fails names the file that was asked for."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import kvgraph
import kvgraph.compiler.targets.tensorrt.lower  # which another user cannot import
from kvgraph.cli.show import _Kernel
from kvgraph.compiler.frontends.folder import read_json
from kvgraph.contract.files import as_path, inside, read_list, replacing, require_replaceable
from kvgraph.contract.hashes import inside_folder
from kvgraph.contract.safetensors import read_layout
from kvgraph.errors import ArtifactError, ModelError, RequestError
from kvgraph.kernels.execute import _read_ptx
from kvgraph.rebuild.torch_engine import kernels_of
from kvgraph.runtime.prefix_file import _read
from tests.support.outputs import another_user

LIMITED = """
import resource, sys
from pathlib import Path
from kvgraph.contract.files import replacing

resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
try:
    with replacing(Path(sys.argv[1])) as file:
        file.write(bytes(1 << 20))
except OSError as error:
    print(error)
"""


def test_a_file_that_is_too_large_is_named(tmp_path: Path) -> None:
    """By its own name, not that of its half; the file before it stays."""
    path = tmp_path / "a.kvp"
    path.write_text("old")
    command = [sys.executable, "-c", LIMITED, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == f"{path}: expected to write all of it, got 'File too large'\n"
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["a.kvp"]


def test_a_folder_that_is_gone_names_the_file(tmp_path: Path) -> None:
    path = tmp_path / "gone" / "a.json"
    message = r"gone/a\.json: expected to write all of it, got 'No such file or directory'"
    with pytest.raises(ArtifactError, match=message) as raised, replacing(path):
        pass
    assert isinstance(raised.value, OSError), "for callers that can do without the file"


@pytest.mark.parametrize("error", [OSError("mine"), OSError(errno.EPERM, "no", "b"), ValueError()])
def test_other_errors_are_the_writers_own(tmp_path: Path, error: Exception) -> None:
    with pytest.raises(type(error)) as raised, replacing(tmp_path / "a"):
        raise error
    assert raised.value is error
    assert not list(tmp_path.iterdir())


def test_a_file_that_cannot_be_read_is_kept(tmp_path: Path) -> None:
    (tmp_path / "a").touch()

    def is_ours(path: Path) -> bool:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    message = r"a: expected no such file, or an old one to replace, got one that cannot be read \(k"
    with pytest.raises(RequestError, match=message):
        require_replaceable(tmp_path / "a", is_ours, "an old one")


@pytest.mark.parametrize(
    ("name", "read", "refusal"),
    [
        ("config.json", read_json, ModelError),
        ("model.safetensors", read_layout, ArtifactError),
        ("system.kvp", _read, ArtifactError),
        (
            "kernels.json",
            lambda path: read_list(path, _Kernel, "kernels", ArtifactError),
            ArtifactError,
        ),
        ("tensorrt.json", lambda path: kernels_of(path.parent), ArtifactError),
        ("a.ptx.gz", lambda path: _read_ptx(path, "a", "sm_80"), ArtifactError),
    ],
)
def test_a_file_that_cannot_be_read_is_not_called_damaged(
    tmp_path: Path, name: str, read: Callable[[Path], object], refusal: type[Exception]
) -> None:
    path = tmp_path / name
    path.touch()
    path.chmod(0)
    message = f"{name}: expected a file that can be read, got 'Permission denied'"
    with another_user(tmp_path), pytest.raises(refusal, match=message):
        read(path)


@pytest.mark.parametrize("name", ["", ".", "..", "/", "a/b", "../../x"])
def test_a_kernel_whose_file_is_no_name(name: str, tmp_path: Path) -> None:
    fields = dict.fromkeys(("num_warps", "registers", "shared", "spill_stores", "spill_loads"), 0)
    kernel = {"kernel": "a", "role": "", "arch": "sm_90", "file": name, **fields}
    (tmp_path / "kernels.json").write_text(json.dumps([kernel]))
    with pytest.raises(ArtifactError, match=r"kernels.json: .*file: expected the name of a file"):
        read_list(tmp_path / "kernels.json", _Kernel, "kernels", ArtifactError)


@pytest.mark.parametrize(
    ("given", "said"), [(5, "int 5"), (None, "NoneType None"), (b"x", "bytes b'x'"), ("", "str ''")]
)
def test_what_names_no_path_is_said_to_name_none(given: Any, said: str, tmp_path: Path) -> None:
    for call in (
        kvgraph.load,
        kvgraph.Engine,
        partial(kvgraph.compile, Path("examples/tiny-llama")),
    ):
        with pytest.raises(ArtifactError) as error:
            call(given)
        name = "out" if isinstance(call, partial) else "artifact"
        assert str(error.value) == f"{name}: expected a path, got {said}"
    if given == "":
        with pytest.raises(ArtifactError, match=r"^model: expected a path, got str ''"):
            kvgraph.compile(given, tmp_path / "out")
    assert as_path("out", tmp_path) == as_path("out", str(tmp_path)) == tmp_path


def test_a_working_folder_that_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No file is said to lie outside."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "a").touch()
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    message = r"^\.\./model: expected a working folder .*, got one that was removed; change"
    for call in (partial(inside, name="a"), partial(inside_folder, name="a")):
        with pytest.raises(ArtifactError, match=message):
            call(Path("../model"))
        assert call(tmp_path / "model") == tmp_path / "model" / "a"


def test_a_locale_that_is_not_utf_8_is_named(tmp_path: Path) -> None:
    """Not the path, whose bytes are UTF-8."""
    code = (
        "import sys; from pathlib import Path; from kvgraph.contract.files import require_utf8\n"
        "require_utf8(Path('plain'), 'it'); require_utf8(Path(sys.argv[1]), 'it')"
    )
    environment = os.environ | {"LC_ALL": "C", "PYTHONUTF8": "0"}
    done = subprocess.run(
        [sys.executable, "-c", code, "\u6f22"], capture_output=True, env=environment, check=False
    )
    assert done.stderr.splitlines()[-1].endswith(
        b": expected a locale of UTF-8 for it, got 'ascii'; set PYTHONUTF8=1"
    )
