"""Options that compile refuses, and output folders that it leaves as they were."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

import kvgraph
from kvgraph.compiler import pipeline
from kvgraph.compiler.output import PREFIX, staging
from kvgraph.errors import ArtifactError, UnsupportedError
from tests.bad_input.damage import refused, sentence, snapshot
from tests.support.command_line import COMMAND, run

ModelFolder = Callable[[str], Path]


# -- compile: options


@pytest.mark.parametrize("page_size", [0, -16, 65537])
def test_page_size_that_the_kernels_lack(
    model_folder: ModelFolder, tmp_path: Path, page_size: int
) -> None:
    text = refused(model_folder("tiny-llama"), tmp_path, "--page-size", page_size)
    assert text == f"page_size: expected 1 to 65536 tokens, got {page_size}"


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("cpu:avx512", "target: expected 'cpu' without an instruction set, got 'cpu:avx512'"),
        ("cuda", "target 'cuda': expected one of ['sm_75', "),
        ("cuda:sm_1", "target 'cuda:sm_1': expected one of ['sm_75', "),
        ("tpu", "target: expected kind cpu or cuda, got 'tpu'"),
    ],
)
def test_target(model_folder: ModelFolder, tmp_path: Path, target: str, message: str) -> None:
    text = refused(model_folder("tiny-llama"), tmp_path, "--target", target)
    assert text.startswith(message)


@pytest.mark.parametrize("option", ["--dtype", "--cache-dtype"])
def test_a_choice_that_is_not_one(tmp_path: Path, option: str) -> None:
    """The option parser's own message: what it expected, and what it got."""
    outcome = run("compile", tmp_path, "-o", tmp_path / "x", option, "int4")
    assert (outcome.code, outcome.out) == (2, "")
    assert option in outcome.err
    assert "int4" in outcome.err
    assert not list(tmp_path.iterdir())


TENSORRT = {"backend": "tensorrt", "target": "cuda:sm_86"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"backend": "tensorrt"},
            r"backend: .* \['onnx', 'torch'\] for target cpu, got 'tensorrt'",
        ),
        ({"target": None}, "target: expected text such as 'cpu', got NoneType None"),
        ({"backend": []}, r"backend: expected one of \['onnx', 'torch'\] .*, got \[\]"),
        ({"dtype": "int4"}, r"dtype: expected one of \['float32', .*\], got 'int4'"),
        (
            {"cache_dtype": "int4"},
            r"cache_dtype: expected one of \['float32', .*\] for a paged cache, got 'int4'",
        ),
        (
            {"max_batch_size": 8},
            "max_batch_size: expected none for backend onnx, whose graph takes .*, got 8",
        ),
        (
            {"max_batch_tokens": 8, "backend": "torch"},
            "max_batch_tokens: expected none for backend torch, .* 8",
        ),
        ({"vocab_size": 99}, "vocab_size: expected None for a model folder, .*, got 99"),
        (
            {"params": kvgraph.KVCacheParams("float32", 2, 32, num_layers=3)},
            "params: num_layers: expected 4 from 'llama', got 3",
        ),
        (TENSORRT | {"max_batch_size": 0}, "max_batch_size: expected 1 to 4096, got 0"),
        (TENSORRT | {"max_batch_size": 4097}, "max_batch_size: expected 1 to 4096, got 4097"),
        (TENSORRT | {"max_batch_tokens": 0}, "max_batch_tokens: expected 1 to 1048576, got 0"),
        (
            TENSORRT | {"max_batch_size": 8, "max_batch_tokens": 7},
            "max_batch_tokens: expected 8 to 1048576, got 7",
        ),
    ],
)
def test_compile_function(
    model_folder: ModelFolder, tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(UnsupportedError, match=message):
        kvgraph.compile(model_folder("tiny-llama"), tmp_path / "out", **options)
    assert not list(tmp_path.iterdir())


# -- compile: the output folder


def test_output_that_exists_is_kept(tmp_path: Path, model_folder: ModelFolder) -> None:
    out = tmp_path / "precious"
    out.mkdir()
    (out / "notes.txt").write_text("mine")
    before = snapshot(tmp_path)
    command = ("compile", model_folder("tiny-llama"), "-o", out)
    expected = f"{out}: expected no such folder yet, got one (kept); use --force"
    assert sentence(run(*command)) == expected
    expected = f"{out}: expected an artifact or an empty folder to replace, got something else"
    assert sentence(run(*command, "--force")) == f"{expected} (kept)"
    assert snapshot(tmp_path) == before


def test_output_that_is_a_file_is_kept(tmp_path: Path, model_folder: ModelFolder) -> None:
    out = tmp_path / "precious"
    out.write_text("mine")
    for options in ([], ["--force"]):
        text = sentence(run("compile", model_folder("tiny-llama"), "-o", out, *options))
        assert text.startswith(f"{out}: expected ")
    assert out.read_text() == "mine"


def test_output_that_appears_during_the_compile_is_kept(tmp_path: Path) -> None:
    out = tmp_path / "late"
    made = staging(out, force=False)
    (made.__enter__() / "new").write_text("new")
    out.mkdir()
    (out / "precious").write_text("mine")
    with pytest.raises(ArtifactError, match="expected no such folder yet, got one"):
        made.__exit__(None, None, None)
    assert snapshot(tmp_path) == {"late": None, "late/precious": b"mine"}


@pytest.mark.parametrize("error", [UnsupportedError("no"), KeyboardInterrupt(), OSError("full")])
def test_a_compile_that_fails_in_the_middle_leaves_nothing(
    tmp_path: Path, model_folder: ModelFolder, error: BaseException
) -> None:
    def lower(traced: Any, folder: Path) -> None:
        (folder / "weights.safetensors").write_text("half")
        raise error

    with (
        mock.patch.object(pipeline, "bind_lower", return_value=lower),
        pytest.raises(type(error)),
    ):
        kvgraph.compile(model_folder("tiny-llama"), tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_terminated_in_the_middle(tmp_path: Path, model_folder: ModelFolder) -> None:
    command = [*COMMAND, "compile", str(model_folder("llama")), "-o", str(tmp_path / "out")]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while process.poll() is None and not list(tmp_path.glob(f"{PREFIX}*/made")):
        time.sleep(0.01)
    process.terminate()
    assert process.wait() == 128 + signal.SIGTERM
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("command", "option"),
    [
        (("compile", "model", "-o", "out"), "--quality-text"),
        (("prefill", "model.kvg", "-o", "out.kvp"), "--prompt-file"),
        (("serve", "model.kvg"), "--api-key-file"),
    ],
)
def test_files_that_are_not_there_are_named_with_their_option(
    tmp_path: Path, command: tuple[str, ...], option: str
) -> None:
    for path, got in ((tmp_path / "none", "nothing there"), (tmp_path, "a folder")):
        said = sentence(run(*command, option, path))
        assert said == f"{option}: expected a file at {path}, got {got}"


def test_a_text_for_quality_is_read_before_the_compile(
    tmp_path: Path, model_folder: ModelFolder
) -> None:
    text = tmp_path / "text"
    text.write_bytes(b"\xff\xfe\x00")
    given = ("compile", model_folder("llama"), "-o", tmp_path / "out", "--quality-text", text)
    assert sentence(run(*given)).startswith(f"{text}: expected text in UTF-8, got ")
    assert not (tmp_path / "out").exists()


def test_killed_in_the_middle(tmp_path: Path, model_folder: ModelFolder) -> None:
    """Nothing that reads as an artifact is left; the next compile works and removes the rest."""
    out = tmp_path / "model.kvg"
    command = [*COMMAND, "compile", str(model_folder("llama")), "-o", str(out)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while process.poll() is None and not (left := sorted(tmp_path.glob(f"{PREFIX}*/made"))):
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL, "it ended before it could be killed"
    assert [path.is_dir() for path in left] == [True]
    assert not out.exists()
    assert sentence(run("verify", out)) == f"{out}: expected an artifact folder, got nothing there"
    text = sentence(run("verify", left[0]))
    assert text.startswith(f"{left[0]}: expected manifest.json in an artifact, got none (not an ")
    assert "did not finish" in text

    assert run("compile", model_folder("llama"), "-o", out, "--page-size", 16).code == 0
    assert os.listdir(tmp_path) == ["model.kvg"]
    assert run("verify", out).code == 0


def test_python_without_docstrings(model_folder: ModelFolder, tmp_path: Path) -> None:
    command = [sys.executable, "-OO", "-m", "kvgraph", "compile", str(model_folder("tiny-llama"))]
    command += ["-o", str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    message = "expected Python with docstrings, which transformers reads, got -OO; use -O"
    assert (done.returncode, done.stderr) == (2, f"kvgraph: compile: {message}\n")


@pytest.mark.parametrize("tool", ["torch", "transformers", "onnx", "onnx-ir", "onnxscript"])
@pytest.mark.parametrize("options", [(), ("--from-artifact",)])
def test_a_tool_that_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tool: str, options: Sequence[str]
) -> None:
    """It is named before the model is read: here none is there. Engines need fewer tools."""
    monkeypatch.setitem(sys.modules, tool.replace("-", "_"), None)
    done = run("compile", *options, tmp_path / "none", "-o", tmp_path / "out")
    needed = not options or tool in ("torch", "onnx", "onnx-ir")
    message = f"{tool}: needed to compile, not installed; pip install 'kvgraph[compile]'"
    assert (done.err == f"kvgraph: {message}\n") == needed, done.err
    assert (done.code, os.listdir(tmp_path)) == (2, [])


IMPORTS = """
import sys
for name in ("torch", "transformers", "onnx", "onnx_ir", "onnxscript", "onnxruntime"):
    sys.modules[name] = None
from kvgraph.cli import main
main()
"""


def test_an_engine_without_what_compiles(tmp_path: Path) -> None:
    """On a base install; modules that earlier tests imported would hide an import."""
    command = [sys.executable, "-c", IMPORTS, "compile", "--from-artifact", "none", "-o", "out"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    message = "torch: needed to compile, not installed; pip install 'kvgraph[compile]'"
    assert (done.returncode, done.stderr) == (2, f"kvgraph: {message}\n")


def test_a_check_needs_the_session(
    tmp_path: Path, model_folder: ModelFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    done = run("compile", tmp_path / "none", "-o", tmp_path / "out")
    message = (
        "check: onnxruntime: needed to run this artifact, not installed; pip install "
        "'kvgraph[onnx]', or leave the check out with --no-check (check=False in Python)"
    )
    assert (done.code, done.err) == (2, f"kvgraph: {message}\n")
    kvgraph.compile(model_folder("tiny-llama"), tmp_path / "out", page_size=16, check=False)


def run_with(place: Path, *command: object) -> subprocess.CompletedProcess[str]:
    """A command in a process that finds modules in `place` first."""
    code = f"import sys; sys.path.insert(0, {str(place)!r}); from kvgraph.cli import main; main()"
    whole = [sys.executable, "-c", code, *map(str, command)]
    return subprocess.run(whole, capture_output=True, text=True, check=False)


def test_a_torch_that_cannot_be_imported(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text(
        "raise OSError('libc10.so: failed to map segment from shared object')"
    )
    done = run_with(tmp_path, "compile", "none", "-o", tmp_path / "out", "--no-check")
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith(
        "kvgraph: torch: needed to compile, installed, and it cannot be imported"
    )
    assert "raise the limit of memory" in done.stderr


@pytest.mark.parametrize("error", ["ImportError", "RuntimeError"])
@pytest.mark.parametrize(
    ("command", "need"),
    [
        (("compile", "FOLDER", "-o", "OUT", "--no-check"), "needed to read a Hugging Face model"),
        (("compile", "FILE", "-o", "OUT", "--no-check"), "needed to read a GGUF file"),
        (("plan", "FOLDER", "--target", "cpu", "--memory", "1GiB"), "needed to plan FOLDER, since"),
    ],
)
def test_transformers_that_cannot_be_imported(
    tmp_path: Path, model_folder: ModelFolder, command: Sequence[str], need: str, error: str
) -> None:
    broken = tmp_path / "transformers"
    broken.mkdir()
    (broken / "__init__.py").write_text(f"raise {error}('tokenizers>=0.22 is required')")
    (tmp_path / "x.gguf").write_bytes(b"GGUF")
    places = {
        "FOLDER": str(model_folder("phi3")),
        "FILE": str(tmp_path / "x.gguf"),
        "OUT": str(tmp_path / "out"),
    }
    done = run_with(tmp_path, *(places.get(each, each) for each in command))
    said = done.stderr.splitlines()[-1]
    assert said.startswith(f"kvgraph: transformers: {need.replace('FOLDER', places['FOLDER'])}")
    assert f"installed, and it cannot be imported ({error}('tokenizers>=0.22 is" in said
    assert said.endswith("pip install --upgrade 'kvgraph[compile]'")
    assert done.returncode == 2
