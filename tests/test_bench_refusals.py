"""What `kvgraph bench` refuses before it measures anything."""

from __future__ import annotations

import errno
import json
import os
import re
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from kvgraph.bench import machine
from kvgraph.bench.plan import make_plan
from kvgraph.bench.protocol import Settings
from tests.support.command_line import run

Compiled = Callable[..., Path]
ModelFolder = Callable[[str], Path]


@pytest.fixture(scope="module")
def artifact(compiled: Compiled) -> Path:
    return compiled("tiny-llama")


SECONDS = f"expected more than 0 and at most {threading.TIMEOUT_MAX:.0f} seconds"


def refused(artifact: Path, *options: Any) -> str:
    """The one sentence of a refusal that came before anything was measured."""
    with mock.patch("kvgraph.bench.run.run_engine", side_effect=AssertionError("measured")):
        outcome = run("bench", artifact, *options)
    assert outcome.code == 2, outcome
    assert outcome.out == ""
    assert re.fullmatch(r"kvgraph: \S[^\n]*\n", outcome.err), outcome.err
    return outcome.err.removeprefix("kvgraph: ").removesuffix("\n")


@pytest.mark.parametrize("threads", [0, -1, 100_000])
def test_threads_beyond_the_machine(artifact: Path, threads: int) -> None:
    most = len(machine.processors())
    expected = f"threads: expected 1 to {most} from the processors of this machine, got {threads}"
    assert refused(artifact, "--threads", threads) == expected


@pytest.mark.parametrize(
    ("options", "name", "got"),
    [
        (("--prompt", 2000), "prompt", "2000 + 128"),
        (("--context", "64,2040"), "context", "2040 + 147, 19 of them before all rows decode"),
        (("--prompt", 1300), "requests", "ragged prompts of up to 1950 + 128"),
        (("--new-tokens", 2000), "prompt", "512 + 2000"),
    ],
)
def test_beyond_max_seq_len(artifact: Path, options: Any, name: str, got: str) -> None:
    expected = (
        f"{name}: expected at most 2048 tokens with the new ones (the model's max_seq_len), "
        f"got {got}"
    )
    assert refused(artifact, *options) == expected


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (("--batches", "1,x"), "batches: expected numbers such as 1,8, got '1,x'"),
        (("--batches", ""), "batches: expected at least one batch size, got none"),
        (("--batches", "0"), "batches: expected each >= 1, got 0"),
        (("--context", "1"), "context: expected each >= 2, got 1"),
        (("--new-tokens", 1), "new_tokens: expected >= 2, got 1"),
        (("--repeats", 0), "repeats: expected >= 1, got 0"),
        (("--requests", -1), "requests: expected >= 0, got -1"),
        (("--batches", 10**10), "batches: expected each at most 4096 rows, got 10000000000"),
        (("--requests", 10**9), "requests: expected at most 65536 ragged ones, got 1000000000"),
        *(
            (("--timeout", given), f"timeout: {SECONDS}, got {given}")
            for given in ("-1", "0", "nan", "inf")
        ),
    ],
)
def test_settings_out_of_range(artifact: Path, options: Any, expected: str) -> None:
    assert refused(artifact, *options) == expected


def test_peers_that_are_none(artifact: Path, model_folder: ModelFolder, tmp_path: Path) -> None:
    model = ("--model", model_folder("tiny-llama"))
    known = "['llama.cpp', 'onnxruntime-genai', 'openvino', 'transformers', 'vllm']"
    for text, expected in {
        "sglang=/bin/python": f"peers: expected one of {known}, got 'sglang'",
        "vllm": "peers: expected NAME=PYTHON, got 'vllm'",
        "vllm=": "peers: expected NAME=PYTHON, got 'vllm='",
        f"vllm={tmp_path}/python": f"peers: vllm: expected a Python interpreter at "
        f"{tmp_path}/python, got none (No such file or directory)",
        "vllm=/bin/true": "peers: vllm: expected a Python interpreter at /bin/true, got a program "
        "that does not answer as one",
        "vllm:int4=x": "peers: vllm: expected one of its classes ['fp32', 'bf16'], got int4; "
        "name one: vllm:fp32=PYTHON",
        f"llama.cpp={sys.executable}": f"peers: llama.cpp: expected llama_cpp in {sys.executable}, "
        f"not installed; {sys.executable} -m pip install llama-cpp-python",
    }.items():
        assert refused(artifact, *model, "--peers", text) == expected
    expected = "peers: transformers: expected a peer with prefix caching, got one without"
    peers = ("--peers", f"transformers={sys.executable}", "--prefix-caching")
    assert refused(artifact, *model, *peers) == expected


def test_the_peers_model(artifact: Path, model_folder: ModelFolder, tmp_path: Path) -> None:
    peers = ("--peers", f"transformers={sys.executable}")
    expected = "model: expected a Hugging Face folder for --peers, got none"
    assert refused(artifact, *peers) == expected
    expected = f"{tmp_path}: expected config.json in a model folder, got none"
    assert refused(artifact, *peers, "--model", tmp_path) == expected
    other = model_folder("llama")
    expected = f"{other}/config.json: vocab_size: expected 2048 as the artifact has, got 160"
    assert refused(artifact, *peers, "--model", other) == expected


@pytest.mark.parametrize(
    ("changed", "refusal"),
    [
        ({"num_hidden_layers": 2}, "num_hidden_layers: expected 4 as the artifact has, got 2"),
        ({"model_type": "qwen3"}, "model_type: expected llama as the artifact has, got qwen3"),
        ({"vocab_size": None}, None),  # the default of its class
    ],
)
@pytest.mark.parametrize("where", ["", "text_config: "])
def test_peers_run_the_artifacts_model(
    artifact: Path,
    model_folder: ModelFolder,
    tmp_path: Path,
    changed: dict[str, Any],
    refusal: str | None,
    where: str,
) -> None:
    """Wherever its config.json has it, and as far as it says."""
    config = json.loads((model_folder("tiny-llama") / "config.json").read_text()) | changed
    if where:
        config = {"model_type": "llava", "text_config": config}
    (tmp_path / "config.json").write_text(json.dumps(config))
    peers = [f"transformers={sys.executable}"]
    settings = Settings(threads=1)
    if refusal is None:
        plan = make_plan([artifact], settings, peers=peers, model=tmp_path, work=tmp_path)
        assert len(plan.engines) == 2
        return
    said = refused(artifact, "--peers", *peers, "--model", tmp_path)
    assert said == f"{tmp_path}/config.json: {where}{refusal}"


def test_the_model_of_a_text_part(
    compiled: Compiled, model_folder: ModelFolder, tmp_path: Path
) -> None:
    """Its type is that of the whole, where the configuration has no parts."""
    config = json.loads((model_folder("gemma3_text") / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"model_type": "gemma3"}))
    make_plan(
        [compiled("gemma3_text")],
        Settings(threads=1, prompt=16, new_tokens=4, contexts=()),
        peers=[f"transformers={sys.executable}"],
        model=tmp_path,
        work=tmp_path,
    )


def test_artifacts_that_do_not_belong_together(
    artifact: Path, compiled: Compiled, tmp_path: Path
) -> None:
    other = compiled("llama")
    expected = f"{other}: expected artifacts of one model, with vocab_size 2048, got 160"
    assert refused(artifact, other) == expected
    third = compiled("gemma2")
    expected = f"{third}: expected artifacts of one model, with num_hidden_layers 2, got 3"
    assert refused(other, third) == expected
    assert refused(artifact, artifact) == "artifacts: expected each folder once, got one twice"
    expected = f"{tmp_path}: expected manifest.json in an artifact, got none"
    assert refused(tmp_path).startswith(expected)


def test_files_that_cannot_be_written(artifact: Path, tmp_path: Path) -> None:
    nowhere = tmp_path / "nowhere" / "a.svg"
    for option in ("--plot", "--save"):
        expected = f"{nowhere}: expected a file in a folder that exists, got none there"
        assert refused(artifact, option, nowhere) == expected
    expected = f"plot: expected a file .svg or .png, got {tmp_path}/a.pdf"
    assert refused(artifact, "--plot", tmp_path / "a.pdf") == expected


def test_one_file_for_two_outputs(artifact: Path, tmp_path: Path) -> None:
    """By whatever names: the picture would take the place of the report."""
    path = tmp_path / "a.svg"
    (tmp_path / "link").symlink_to(tmp_path)
    for other in (path, tmp_path / "link" / "a.svg", f"{tmp_path}/../{tmp_path.name}/a.svg"):
        said = refused(artifact, "--save", path, "--plot", other)
        assert said == f"--plot: expected another file than that of --save, got {Path(other)}"


def test_a_folder_of_peers_that_cannot_be_made(artifact: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    expected = "--peer-models: expected a folder at {}, or a place to make it, got {!r}"
    for name, why in {"file": "File exists", "file/in": "Not a directory"}.items():
        path = tmp_path / name
        assert refused(artifact, "--peer-models", path) == expected.format(path, why)


@pytest.mark.parametrize(
    ("option", "name", "what"),
    [
        ("--save", "a.json", "report"),
        ("--plot", "a.svg", "picture"),
        ("--plot", "a.png", "picture"),
    ],
)
def test_a_file_that_no_run_made_is_kept(
    artifact: Path, tmp_path: Path, option: str, name: str, what: str
) -> None:
    path = tmp_path / name
    expected = (
        f"{path}: expected no such file, or an earlier {what} of kvgraph bench to replace, "
        "got {} (kept); give another name"
    )
    path.write_text('{"mine": 1}')
    assert refused(artifact, option, path) == expected.format("another file")
    path.unlink()
    os.mkfifo(path)
    assert refused(artifact, option, path) == expected.format("a pipe")
    path.unlink()
    path.symlink_to("elsewhere")
    assert refused(artifact, option, path) == expected.format("a link")


def test_matplotlib_missing(artifact: Path, tmp_path: Path) -> None:
    with mock.patch.dict(sys.modules, {"matplotlib": None}):
        text = refused(artifact, "--plot", tmp_path / "a.svg")
    assert text == "matplotlib: needed for --plot, not installed; pip install 'kvgraph[bench]'"


def test_no_temporary_folder(artifact: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    none = FileNotFoundError(errno.ENOENT, "No usable temporary directory found in ['/tmp']")
    monkeypatch.setattr(tempfile, "gettempdir", mock.Mock(side_effect=none))
    assert refused(artifact).startswith("TMPDIR: expected a temporary folder that can be written")
