"""The API key, which is checked before routing."""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable, Sequence

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from kvgraph.serve.errors import ServeError

OPEN_PATHS = ("/", "/health", "/ready")
"""Paths that need no key."""


class RequiresKey:
    """Passes a request on if it has one of `keys`, or if its path needs none.

    `refuse`: gives the answer to any other request. Unknown paths and wrong methods need a key too.
    """

    def __init__(
        self,
        app: ASGIApp,
        keys: Sequence[str],
        refuse: Callable[[Request, ServeError], Awaitable[Response]],
    ) -> None:
        self._app = app
        self._keys = [key.encode() for key in keys]
        self._refuse = refuse

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer = self._app
        if scope["type"] == "http" and scope["path"] not in OPEN_PATHS:
            request = Request(scope)
            if not self._has_key(request):
                sentence = "authorization: expected Bearer and a key of this server"
                answer = await self._refuse(request, ServeError(401, sentence))
        await answer(scope, receive, send)

    def _has_key(self, request: Request) -> bool:
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        key = given.strip().encode() if scheme.lower() == "bearer" else b""
        # Compare every key, so that the time reveals nothing.
        return True in [hmac.compare_digest(key, known) for known in self._keys]
