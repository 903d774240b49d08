"""What a server allows."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """Limits of a server, and whom it serves.

    Requests wait in a queue of at most `max_queued_requests` behind those that the engine's batch
    has rows for, and of at most `max_queued_tokens` tokens of prompts (None: 16 steps of prefill).
    """

    max_queued_requests: int = 64
    max_queued_tokens: int | None = None
    api_keys: tuple[str, ...] = ()
    """One of them is asked of every request but those for /, /health and /ready; none: no key."""
    drain_seconds: float = 30.0
    """How long running requests may go on after SIGTERM."""
    metrics_prefix: str = "kvgraph:"
    log_prompts: bool = False
    uses_generation_config: bool = True
    """Whether the artifact's generation_config.json says how a request is sampled that does not."""
    allowed_origins: tuple[str, ...] = ()
    """Origins whose pages a browser lets ask (CORS); `*`: all."""
    max_body_bytes: int = 4 << 20
    max_choices: int = 128
    """Of one request: its prompts times `n`."""
    stream_interval: int = 1
    """Fewest new tokens of a stream's frame, but for its first one and its last."""
    max_unread_tokens: int = 4096
    """A stream whose reader is more tokens behind is cancelled, as of `AsyncEngine.submit`."""
    send_seconds: float = 60.0
    """A connection that takes nothing of its answer for so long is closed."""
    receive_seconds: float = 60.0
    """A request is refused whose head is not whole by then, or of whose body nothing comes."""
    nice: int = 0
    """How far the threads that compute stand behind the event loop's, in Linux's niceness."""
    kv_events: str | None = None
    """ZeroMQ endpoint on which the pool's pages are told to routers."""
    kv_events_replay: str | None = None
    """Endpoint at which they ask for what they missed."""
    kv_events_topic: str = "kv-events"
