"""Answers that the engine is done with and a client is not, as the server ends."""

from __future__ import annotations

import json
import socket
import time
from http.client import HTTPResponse
from pathlib import Path
from typing import Any

import pytest

from tests.serve.running import LIMITED, SECONDS, Server, posted, serving, wait_for

TEXTS = "/v1/completions"
COUNT, TOKENS = 8, 2000
MANY = {"prompt": "The", "max_tokens": TOKENS, "n": COUNT, "logprobs": 20, "ignore_eos": True}
"""More than the system buffers for a connection that no client reads."""


def generated(server: Server, **fields: Any) -> socket.socket:
    """A connection whose client has taken nothing of an answer that is complete."""
    to = server.connect(window=4096)
    to.sendall(posted(TEXTS, MANY | fields))
    wait_for(lambda: server.state()["generated_tokens"] == COUNT * TOKENS, "it is not generated")
    return to


@pytest.mark.parametrize("stream", [False, True])
def test_a_server_that_drains_delivers_what_is_done(
    stream: bool, artifact: Path, tmp_path: Path
) -> None:
    options = json.dumps({"closing_seconds": 0})
    with serving(tmp_path / "log", artifact, options, command=LIMITED) as server:
        with generated(server, stream=stream) as to, HTTPResponse(to) as answer:
            server.terminate()
            time.sleep(0.5)
            to.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)
            answer.begin()
            body = answer.read()
        assert server.process.wait(SECONDS) == 0
        if stream:
            assert body.endswith(b"data: [DONE]\n\n")
        else:
            usage = json.loads(body)["usage"]
            assert usage["completion_tokens"] == COUNT * TOKENS
        assert f'"path":"{TEXTS}","status":200' in server.log()


def test_a_stream_that_is_cut_is_logged_as_one(artifact: Path, tmp_path: Path) -> None:
    """Its status is that of an answer that the end of the server cuts."""
    options = json.dumps({"closing_seconds": 0, "drain_seconds": 0})
    with serving(tmp_path / "log", artifact, options, command=LIMITED) as server:
        with generated(server, stream=True):
            server.terminate()
            assert server.process.wait(SECONDS) == 0
        assert f'"path":"{TEXTS}","status":503' in server.log()
