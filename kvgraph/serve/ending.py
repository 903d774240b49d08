"""The answer to requests that the end of the server cancels."""

from __future__ import annotations

import asyncio

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kvgraph.serve.errors import ServeError
from kvgraph.serve.log import REQUEST_ID, log_answer
from kvgraph.serve.service import Service


class AnswersAtEnd:
    """Answers 503 to a request that uvicorn cancels before its first header.

    uvicorn does so after its time for shutdown, and itself answers 500 in plain text.
    """

    def __init__(self, app: ASGIApp, service: Service) -> None:
        self._app = app
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        has_begun = False

        async def send_on(message: Message) -> None:
            nonlocal has_begun
            has_begun = True
            await send(message)

        try:
            await self._app(scope, receive, send_on)
        except asyncio.CancelledError:
            if has_begun or not self._service.is_draining:
                raise
            refused = ServeError(503, "the server ends")
            log_answer(scope["path"], refused.status, Headers(scope=scope).get(REQUEST_ID, ""))
            await Response(refused.body(), refused.status, headers=refused.headers())(
                scope, receive, send
            )
