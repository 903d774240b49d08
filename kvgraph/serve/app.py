"""The routes of a server, as an ASGI application."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress
from difflib import get_close_matches
from functools import partial
from importlib import resources
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Lifespan, Receive, Scope, Send

from kvgraph import __version__
from kvgraph.contract.values import brief
from kvgraph.errors import RequestError
from kvgraph.serve.answers import encoded
from kvgraph.serve.chats import answer_chat, chat_events, chat_job, chat_tokens
from kvgraph.serve.completions import answer_completion, completion_events, completion_job
from kvgraph.serve.ending import AnswersAtEnd
from kvgraph.serve.errors import ServeError, error_body
from kvgraph.serve.generation import Generation
from kvgraph.serve.items import ResponseRequest
from kvgraph.serve.jobs import Job, most_unread, require_answer_room
from kvgraph.serve.keys import RequiresKey
from kvgraph.serve.log import REQUEST_ID, is_request_id, log_answer, log_request
from kvgraph.serve.protocol import (
    OF_BOTH,
    OF_CHATS,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
    decoded,
)
from kvgraph.serve.responses import answer_response, response_events, response_job
from kvgraph.serve.service import Served, Service

JSON = "application/json"

Events = Callable[[Job, Generation], AsyncIterator[bytes]]
Answer = Callable[[Job, Generation], Awaitable[dict[str, object]]]


def make_app(service: Service, lifespan: Lifespan[Starlette] | None = None) -> Starlette:
    """The application; `service` may still be loading."""
    endpoints = Endpoints(service)
    routes = [
        Route("/", endpoints.page),
        Route("/health", endpoints.health),
        Route("/ready", endpoints.ready),
        Route("/version", endpoints.version),
        Route("/metrics", endpoints.metrics),
        Route("/state", endpoints.state),
        Route("/v1/models", endpoints.models),
        Route("/v1/models/{name:path}", endpoints.model),
        Route("/v1/completions", endpoints.completions, methods=["POST"]),
        Route("/v1/chat/completions", endpoints.chat, methods=["POST"]),
        Route("/v1/responses", endpoints.responses, methods=["POST"]),
        Route("/tokenize", endpoints.tokenize, methods=["POST"]),
        Route("/detokenize", endpoints.detokenize, methods=["POST"]),
    ]
    handlers: dict[Any, Any] = {
        ServeError: _refused,
        404: _not_found,
        405: _wrong_method,
        ClientDisconnect: _gone,
        500: _failed,
    }
    app = Starlette(routes=routes, exception_handlers=handlers, lifespan=lifespan)
    if keys := service.options.api_keys:
        app.add_middleware(RequiresKey, keys=keys, refuse=_refused)
    app.add_middleware(AnswersAtEnd, service=service)
    if origins := service.options.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=origins,
            allow_methods=["*"],
            allow_headers=["*"],
            expose_headers=["retry-after", REQUEST_ID],
        )
    app.router.redirect_slashes = False
    return app


class Endpoints:
    """One method for each route."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._created = int(time.time())
        self._page = resources.files("kvgraph.serve").joinpath("page.html").read_text("utf-8")

    # -- the server itself

    async def page(self, request: Request) -> Response:
        return Response(self._page, media_type="text/html; charset=utf-8", headers=PAGE_HEADERS)

    async def health(self, request: Request) -> Response:
        return Response(b"{}", media_type=JSON)

    async def ready(self, request: Request) -> Response:
        self._service.require_ready()
        return Response(b"{}", media_type=JSON)

    async def version(self, request: Request) -> Response:
        return _answered(request, {"version": __version__})

    async def metrics(self, request: Request) -> Response:
        text = self._service.require_loaded().metrics.text()
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    async def state(self, request: Request) -> Response:
        """The data that the page at / shows."""
        served = self._service.require_loaded()
        try:
            state = await served.state()
            state["num_queued"] = served.admission.num_queued
            return Response(encoded(state), media_type=JSON)
        except RequestError as error:  # the engine was closed: the server ends
            raise ServeError(503, "the server ends") from error

    async def models(self, request: Request) -> Response:
        body = {"object": "list", "data": [self._model()]}
        return _answered(request, body)

    async def model(self, request: Request) -> Response:
        model, asked = self._model(), request.path_params["name"]
        if asked != model["id"]:
            raise ServeError(404, f"model: expected {model['id']!r}, got {brief(asked)}")
        return _answered(request, model)

    def _model(self) -> dict[str, object]:
        return {
            "id": self._service.name,
            "object": "model",
            "created": self._created,
            "owned_by": "kvgraph",
            "max_model_len": self._service.require_loaded().facts.longest,
        }

    async def tokenize(self, request: Request) -> Response:
        served = self._service.require_loaded()
        given = decoded(await self._body(request), TokenizeRequest)
        if (given.prompt is None) == (given.messages is None):
            raise ServeError(400, "tokenize: expected one of prompt and messages")
        tokens = await _tokens_of(served, given)
        found = {"tokens": tokens, "count": len(tokens), "max_model_len": served.facts.longest}
        if given.return_token_strs:
            strings = await asyncio.to_thread(lambda: [served.spell(token) for token in tokens])
            found["token_strs"] = strings
        return _answered(request, found)

    async def detokenize(self, request: Request) -> Response:
        served = self._service.require_loaded()
        given = decoded(await self._body(request), DetokenizeRequest)
        text = await asyncio.to_thread(served.detokenize, given.tokens)
        return _answered(request, {"prompt": text})

    # -- generation

    async def completions(self, request: Request) -> Response:
        self._service.require_ready()
        given = decoded(await self._body(request), CompletionRequest)
        job = await completion_job(self._service, given)
        return await self._run(request, job, answer_completion, completion_events)

    async def chat(self, request: Request) -> Response:
        self._service.require_ready()
        given = decoded(await self._body(request), ChatRequest)
        job = await chat_job(self._service, given)
        return await self._run(request, job, answer_chat, chat_events)

    async def responses(self, request: Request) -> Response:
        self._service.require_ready()
        given = decoded(await self._body(request), ResponseRequest)
        job = await response_job(self._service, given)
        answer, events = partial(answer_response, given), partial(response_events, given)
        return await self._run(request, job, answer, events)

    async def _run(
        self, request: Request, job: Job, answer: Answer, events: Events, tries: int = 2
    ) -> Response:
        served = self._service.require_ready()
        require_answer_room(job)
        options = self._service.options
        interval = options.stream_interval if job.streams else 1
        drops = job.drops_output
        generation = Generation(served.runner, served.admission, served.metrics, interval, drops)
        if is_request_id(given := request.headers.get(REQUEST_ID, "")):
            job.name = given
        started = time.perf_counter()

        def log(status: int) -> None:
            log_request(request.url.path, status, job, generation, started, options.log_prompts)

        try:
            most = most_unread(job, options.max_unread_tokens)
            await generation.start(job.prompts, job.params, job.salt, most)
            if job.streams:
                if generation.was_lost and tries > 1:  # no part of the answer is sent yet
                    generation.close()
                    return await self._run(request, job, answer, events, tries - 1)
                frames = events(job, generation)
                return EventStream(frames, generation, log)
            body = await _unless_gone(request, answer(job, generation))
        except ServeError as error:
            if generation.was_lost and not job.streams and tries > 1:
                return await self._run(request, job, answer, events, tries - 1)
            log(error.status)
            error.is_logged = True
            raise
        finally:
            if not job.streams:
                generation.close()
        log(200)
        return Response(encoded(body), media_type=JSON)

    async def _body(self, request: Request) -> bytes:
        coding = ", ".join(request.headers.getlist("content-encoding"))
        if {one.strip().lower() for one in coding.split(",")} - {"", "identity"}:
            raise ServeError(415, f"content-encoding: expected identity, got {brief(coding)}")
        said = request.headers.get("content-length", "")
        self._require_size(int(said) if said.isdigit() else 0)
        seconds = self._service.options.receive_seconds
        loop = asyncio.get_running_loop()
        parts, size = [], 0
        try:
            async with asyncio.timeout(seconds) as limit:
                async for part in request.stream():
                    size += len(part)
                    self._require_size(size)
                    parts.append(part)
                    limit.reschedule(loop.time() + seconds)
        except TimeoutError as error:
            sentence = f"body: expected all of it, got nothing more for {seconds:g} seconds"
            raise ServeError(408, sentence) from error
        except asyncio.CancelledError as error:  # by uvicorn, after its time for shutdown
            raise ServeError(503, "body: expected all of it before the server ended") from error
        return b"".join(parts)

    def _require_size(self, size: int) -> None:
        most = self._service.options.max_body_bytes
        if size > most:
            raise ServeError(413, f"body: expected at most {most} bytes, got {size} or more")


class EventStream(Response):
    """Sends server-sent events until they end, or the client disconnects."""

    def __init__(
        self, frames: AsyncIterator[bytes], generation: Generation, log: Callable[[int], None]
    ) -> None:
        super().__init__()
        self._frames = frames
        self._generation = generation
        self._log = log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        sending = asyncio.ensure_future(self._send(send))
        leaving = asyncio.ensure_future(_gone_from(receive))
        with suppress(asyncio.CancelledError):  # by uvicorn, as the server ends before all is sent
            await asyncio.wait((sending, leaving), return_when=asyncio.FIRST_COMPLETED)
        is_cut = self._generation.is_cut(sending.done())
        self._generation.close()
        leaving.cancel()
        sending.cancel()
        with suppress(asyncio.CancelledError, OSError):
            await sending
        self._log(503 if is_cut else 200)

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": STREAM_HEADERS})
        async for frame in self._frames:
            await send({"type": "http.response.body", "body": frame, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-store"),
    (b"x-accel-buffering", b"no"),  # a proxy must forward each frame at once
]

PAGE_HEADERS = {
    "content-security-policy": "default-src 'none'; style-src 'unsafe-inline'; "
    "script-src 'unsafe-inline'; connect-src 'self'",
    "cache-control": "no-store",
}


async def _tokens_of(served: Served, given: TokenizeRequest) -> list[int]:
    """Token ids of a /tokenize request; messages are rendered as a chat's are."""
    if given.messages is not None:
        chat = ChatRequest(
            messages=given.messages,
            **{name: getattr(given, name) for name in OF_CHATS},
        )
        return await chat_tokens(served, chat)
    for name in OF_CHATS:
        if name not in OF_BOTH and getattr(given, name) not in (None, False):
            raise ServeError(400, f"{name}: expected messages next to it, got a prompt", param=name)
    return await served.tokenize(given.prompt or "", given.add_special_tokens is not False)


async def _gone_from(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _unless_gone(request: Request, work: Awaitable[dict[str, object]]) -> dict[str, object]:
    """The result of `work`, which is cancelled if the client disconnects."""
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_gone_from(request.receive))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ServeError(499, "the client left")
        return working.result()
    finally:
        leaving.cancel()
        working.cancel()


def _log(request: Request, status: int) -> None:
    log_answer(request.url.path, status, request.headers.get(REQUEST_ID, ""))


def _answered(request: Request, body: object) -> Response:
    """The response of an endpoint that generates nothing; logs the request."""
    _log(request, 200)
    return Response(encoded(body), media_type=JSON)


async def _refused(request: Request, error: ServeError) -> Response:
    if not error.is_logged:
        _log(request, error.status)
    return Response(error.body(), error.status, headers=error.headers())


async def _not_found(request: Request, error: Exception) -> Response:
    path = request.scope["path"]
    if (request.method, path) == ("OPTIONS", "*"):  # of the server as a whole (RFC 9110, 9.3.7)
        return Response(status_code=204)
    _log(request, 404)
    known = [route.path for route in request.app.routes if isinstance(route, Route)]
    nearest = get_close_matches(path[:MOST_COMPARED], known, 1, ALIKE)
    hint = f"; did you mean {nearest[0]}?" if nearest else ""
    body = error_body(404, f"{path}: expected a path of this server, got another{hint}")
    return Response(body, 404, media_type=JSON)


MOST_COMPARED, ALIKE = 64, 0.7
"""Most characters of an unknown path that are compared, and the least similarity of a hint."""


async def _wrong_method(request: Request, error: HTTPException) -> Response:
    """Name the methods that the path takes (RFC 9110, 15.5.6); OPTIONS asks for them (9.3.7)."""
    allow = {"allow": ", ".join([*(error.headers or {}).values(), "OPTIONS"])}
    if request.method == "OPTIONS":
        return Response(status_code=204, headers=allow)
    _log(request, 405)
    body = error_body(405, f"{request.url.path}: expected another method than {request.method}")
    return Response(body, 405, media_type=JSON, headers=allow)


async def _failed(request: Request, error: Exception) -> Response:
    """Answer 500 for an error of this server; its log has the traceback."""
    _log(request, 500)
    body = error_body(500, f"{request.url.path}: the server failed: {type(error).__name__}")
    return Response(body, 500, media_type=JSON)


async def _gone(request: Request, error: ClientDisconnect) -> Response:
    if "is_refused" not in request.scope["state"]:  # set by the connection, which has logged it
        _log(request, 499)
    return Response(status_code=499)
