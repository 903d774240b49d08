"""A server whose clients hold all its file descriptors: requests open no file, and no module."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.serve.running import Server, answered, serving

SEALED = """
import errno, os, sys
from kvgraph import __main__
from kvgraph.serve import server

def refuse(event, given):
    if event in ("open", "import"):  # an import of a module that is not there yet
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), given[0])

def write_line(line, call=server.write_line):
    if line["event"] == "ready":
        sys.addaudithook(refuse)
    call(line)

server.write_line = write_line
__main__.main()
"""
"""`kvgraph`, in which no file can be opened once its server is ready."""

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
TEXT: dict[str, Any] = {"prompt": "a", "max_tokens": 4}
SCHEMA: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "string"}}}
TOOL = {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}
FORMAT = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}
GUIDED = ("response_format", "guided_regex", "guided_grammar")


@pytest.fixture(scope="module")
def sealed(artifact: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("sealed") / "log"
    command = (sys.executable, "-c", SEALED, "serve", str(artifact), "--port", "0")
    with serving(log, "--threads", 1, command=command) as server:
        yield server


@pytest.mark.parametrize("path", ["/", "/health", "/metrics", "/state", "/version", "/v1/models"])
def test_pages_open_no_file(sealed: Server, path: str) -> None:
    assert sealed.client.get(path).status_code == 200


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", TEXT | {"temperature": 1}),
        ("/v1/completions", TEXT | {"logprobs": 2, "echo": True}),
        ("/v1/completions", TEXT | {"stop": ["x"], "stream": True}),
        ("/v1/completions", TEXT | {"guided_regex": "[a-z]+"}),
        ("/v1/completions", TEXT | {"guided_grammar": 'root ::= "a"'}),
        ("/v1/chat/completions", CHAT),
        ("/v1/chat/completions", CHAT | {"logprobs": True, "top_logprobs": 2}),
        ("/v1/chat/completions", CHAT | {"tools": [TOOL]}),
        ("/v1/chat/completions", CHAT | {"response_format": FORMAT}),
        ("/v1/responses", {"input": "hi", "max_output_tokens": 4}),
        ("/tokenize", {"prompt": "a b"}),
        ("/tokenize", {"prompt": "a " * 20_000}),
        ("/detokenize", {"tokens": [1, 2]}),
    ],
)
def test_requests_open_no_file(sealed: Server, path: str, body: dict[str, Any]) -> None:
    if body.keys() & {*GUIDED}:
        pytest.importorskip("llguidance", reason="needs the extra `guide`")
    answer = sealed.post(path, body)
    assert answer.status_code == 200, answer.text
    if not body.get("stream"):
        answered(answer)
