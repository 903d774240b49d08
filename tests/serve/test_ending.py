"""A request that uvicorn cancels as the server ends."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any

import pytest
from starlette.types import Message, Receive, Scope, Send

from kvgraph.serve.ending import AnswersAtEnd

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
