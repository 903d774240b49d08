"""Errors of the server, in OpenAI's form."""

from __future__ import annotations

import re

import msgspec

from kvgraph.runtime.token_stream import ENDED, STOPPED


class ServeError(Exception):
    """A request that is answered with `status` and one sentence.

    `code`: OpenAI's error code; None: the status's usual one. `retry_after`: seconds after which
    the request may fit; always 1 for a 503.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.retry_after = 1 if status == 503 else retry_after
        self.is_logged = False

    def body(self) -> bytes:
        return error_body(self.status, self.message, self.param, self.code)

    def headers(self) -> dict[str, str]:
        headers = {"content-type": "application/json"}
        if self.retry_after is not None:
            headers["retry-after"] = str(self.retry_after)
        if self.status == 401:
            headers["www-authenticate"] = "Bearer"
        if self.status == 415:
            headers["accept-encoding"] = "identity"
        return headers


def too_long(param: str, longest: int, got: str) -> ServeError:
    """The error for a request that exceeds a context of `longest` tokens."""
    return ServeError(
        400,
        f"{param}: expected at most {longest} tokens of prompt and output together, got {got}; "
        f"this model's maximum context length is {longest} tokens",
        param=param,
        code="context_length_exceeded",
    )


def require_vocabulary(param: str, greatest: int, size: int) -> None:
    """Raise ServeError unless token id `greatest` is in a vocabulary of `size`."""
    if greatest >= size:
        sentence = f"{param}: expected token ids in [0, {size}), got {greatest}"
        raise ServeError(400, sentence, param=param)


KINDS = {
    401: ("authentication_error", "invalid_api_key"),
    404: ("not_found_error", "not_found"),
    405: ("invalid_request_error", "method_not_allowed"),
    413: ("invalid_request_error", "body_too_large"),
    429: ("rate_limit_error", "queue_full"),
    431: ("invalid_request_error", "head_too_large"),
    500: ("server_error", "server_error"),
    503: ("server_error", "not_ready"),
}
"""OpenAI's `type` and `code` of an error, by status; other statuses are invalid requests."""


ESCAPED = {code: chr(code).encode("unicode_escape").decode() for code in (*range(32), 127)}
"""Escapes of control characters, so that a message with a client's text stays one line."""


def for_client(sentence: str) -> str:
    """An engine's error message without its request id, and without a reason why the engine ended
    that names the server's files: the command prints it."""
    path = f"(?<={ENDED}): .*/.*|(?<={STOPPED}): .*/.*"
    return re.sub(f"^request '[^']*': |{path}", "", sentence, flags=re.DOTALL)


def error_body(
    status: int, message: str, param: str | None = None, code: str | None = None
) -> bytes:
    kind, usual = KINDS.get(status, ("invalid_request_error", None))
    sentence = message.translate(ESCAPED)
    error = {"message": sentence, "type": kind, "param": param, "code": code or usual}
    return msgspec.json.encode({"error": error})
