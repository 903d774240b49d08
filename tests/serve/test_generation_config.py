"""A server samples as the model's generation_config.json says, unless a request does."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvgraph import Engine, SamplingParams
from tests.serve.running import COMMAND, SECONDS, Server, serving
from tests.support.artifacts import rehash

OWN = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.9, "min_p": 0.01}
PROMPT, SEEDED = "The import statement", {"seed": 5, "max_tokens": 12}


def with_file(artifact: Path, folder: Path, text: str) -> Path:
    shutil.copytree(artifact, folder)
    (folder / "generation_config.json").write_text(text)
    rehash(folder)
    return folder


@pytest.fixture(scope="module")
def sampled(artifact: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("sampled")
    content = json.dumps(OWN | {"repetition_penalty": 1.2})
    own = with_file(artifact, folder / "own.kvg", content)
    with serving(folder / "log", own, "--threads", 1) as server:
        yield server


def text_of(engine: Engine, **fields: float) -> str:
    sampling = SamplingParams(seed=5, max_new_tokens=12, **fields)
    return engine.generate([PROMPT], sampling)[0].text


def test_a_request_that_does_not_say(sampled: Server, engine: Engine) -> None:
    given = {"prompt": PROMPT, **SEEDED}
    answer = sampled.post("/v1/completions", given).json()["choices"][0]["text"]
    own = {name: value for name, value in OWN.items() if name != "do_sample"}
    assert answer == text_of(engine, **own, repetition_penalty=1.2)
    assert answer != text_of(engine, temperature=1)
    mine = sampled.complete(PROMPT, **SEEDED, temperature=0, repetition_penalty=1)
    assert mine["choices"][0]["text"] == text_of(engine)


def test_a_response_tells_how_it_was_sampled(sampled: Server) -> None:
    for asked, told in (({}, (0.6, 0.9)), ({"temperature": 2, "top_p": 1}, (2, 1))):
        given = {"input": "hi", "max_output_tokens": 2, **asked}
        answer = sampled.post("/v1/responses", given).json()
        assert (answer["temperature"], answer["top_p"]) == told


def test_the_log_tells_it(sampled: Server) -> None:
    own = {name: value for name, value in OWN.items() if name != "do_sample"}
    assert sampled.event("ready")["sampling"] == own | {"repetition_penalty": 1.2}


def test_a_server_that_does_not_read_it(artifact: Path, engine: Engine, tmp_path: Path) -> None:
    own = with_file(artifact, tmp_path / "own.kvg", json.dumps(OWN))
    options = ("--threads", 1, "--generation-config", "none")
    with serving(tmp_path / "log", own, *options) as server:
        given = {"prompt": PROMPT, **SEEDED}
        answer = server.post("/v1/completions", given).json()["choices"][0]["text"]
        assert "sampling" not in server.event("ready")
    assert answer == text_of(engine, temperature=1)


def test_a_value_that_no_request_can_have(artifact: Path, tmp_path: Path) -> None:
    """It ends the server, before any request meets it."""
    own = with_file(artifact, tmp_path / "own.kvg", '{"repetition_penalty": 0}')
    done = subprocess.run(
        [*COMMAND, own, "--port", "0"], capture_output=True, text=True, timeout=SECONDS, check=False
    )
    assert done.returncode == 2
    sentence = "repetition_penalty: expected in [1e-9, 1e9], got 0.0"
    assert done.stderr.splitlines()[-1] == f"kvgraph: {own}/generation_config.json: {sentence}"
