"""Requests that the end of the server cuts."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.types import Message, Receive, Scope, Send

from kvgraph.serve.ending import AnswersAtEnd
from tests.serve.running import SECONDS, frames, paced

SCOPE: Scope = {"type": "http", "path": "/v1/completions", "headers": [(b"x-request-id", b"one")]}
HEAD: Message = {"type": "http.response.start", "status": 200, "headers": []}


async def cancelled(sends: list[Message], is_draining: bool) -> list[Message]:
    """What is sent for a request that is cancelled after its application has sent `sends`."""
    sent: list[Message] = []

    async def application(scope: Scope, receive: Receive, send: Send) -> None:
        for message in sends:
            await send(message)
        await asyncio.sleep(60)

    async def send(message: Message) -> None:
        sent.append(message)

    async def receive() -> Message:
        return {"type": "http.disconnect"}

    service: Any = SimpleNamespace(is_draining=is_draining)
    running = asyncio.ensure_future(AnswersAtEnd(application, service)(SCOPE, receive, send))
    await asyncio.sleep(0)
    running.cancel()
    await asyncio.wait([running])
    assert running.cancelled() == (bool(sends) or not is_draining)
    return sent


def test_it_is_answered_before_its_first_header(capsys: pytest.CaptureFixture[str]) -> None:
    head, body = asyncio.run(cancelled([], is_draining=True))
    assert head["status"] == 503
    assert dict(head["headers"])[b"retry-after"] == b"1"
    assert json.loads(body["body"])["error"]["message"] == "the server ends"
    line = json.loads(capsys.readouterr().err)
    assert (line["request"], line["path"], line["status"]) == ("one", "/v1/completions", 503)


def test_it_is_cut_behind_its_first_header_or_where_the_server_goes_on() -> None:
    assert asyncio.run(cancelled([HEAD], is_draining=True)) == [HEAD]
    assert not asyncio.run(cancelled([], is_draining=False))


def test_a_stream_that_the_drain_ends_is_logged_as_one(artifact: Path, tmp_path: Path) -> None:
    """With the status of an answer that is not streamed, though its client has read 200."""
    body = {"prompt": "The", "max_tokens": 100, "ignore_eos": True, "stream": True}
    with paced(tmp_path, artifact, "--threads", 1, "--drain-seconds", 0) as (server, pace):
        pace.allow(1)
        with server.client.stream("POST", "/v1/completions", json=body) as answer:
            lines = answer.iter_lines()
            assert next(lines).startswith("data: ")
            server.terminate()
            assert "error" in frames(lines)[-1]
        pace.end()
        assert server.process.wait(SECONDS) == 0
        logged = [json.loads(line) for line in server.log().splitlines() if '"reasons"' in line]
        assert [(line["status"], line["reasons"]) for line in logged] == [(503, ["error"])]
