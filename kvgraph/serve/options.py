"""ServeOptions: settings and limits of a server."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """Settings and limits of a server.

    Requests wait in a queue behind those that can start: for which the batch has a row, and the
    pool has free pages for the prompt. The queue holds at most `max_queued_requests`, with at most
    `max_queued_tokens` prompt tokens (None: 16 steps of prefill).
    """

    max_queued_requests: int = 64
    max_queued_tokens: int | None = None
    api_keys: tuple[str, ...] = ()
    """Accepted keys; required for all paths but /, /health and /ready. Empty: no key is needed."""
    drain_seconds: float = 15.0
    """Time for which running requests continue after SIGTERM."""
    metrics_prefix: str = "kvgraph:"
    log_prompts: bool = False
    uses_generation_config: bool = True
    """Whether generation_config.json of the artifact sets the defaults of sampling."""
    allowed_origins: tuple[str, ...] = ()
    """Origins from which browsers may send requests (CORS); `*`: all."""
    keep_alive_seconds: int = 75
    """Time for which an idle connection stays open: longer than a proxy's, usually 60."""
    max_body_bytes: int = 4 << 20
    max_choices: int = 128
    """Most choices of one request: its prompts times `n`."""
    stream_interval: int = 1
    """Fewest new tokens of a stream's frame, except its first and last ones."""
    max_unread_tokens: int = 4096
    """Unread tokens above which a choice of a stream is cancelled, as in `AsyncEngine.submit`.
    Fewer in a stream of many choices and log-probabilities."""
    send_seconds: float = 60.0
    """Time after which a connection is closed if the client takes nothing of its answer."""
    receive_seconds: float = 60.0
    """Time limit for a request's whole head, and between two pieces of its body."""
    nice: int = 0
    """Niceness (Linux) of compute threads relative to the event loop's thread."""
    kv_events: str | None = None
    """ZeroMQ endpoint at which changes of the pool's pages are published to routers."""
    kv_events_replay: str | None = None
    """Endpoint at which routers request missed events."""
    kv_events_topic: str = "kv-events"
