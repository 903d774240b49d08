"""The command `kvgraph serve`."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import replace
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvgraph.cli.options import (
    POOL_MEMORY,
    ArtifactFolder,
    CollectiveTimeout,
    DiskBytes,
    DiskFolder,
    HostMemory,
    NumPages,
    RemoteServer,
    Threads,
    Verify,
    named,
    require_file,
    text_of,
)
from kvgraph.cli.ranks import follows
from kvgraph.contract.devices import Target
from kvgraph.contract.loading import require_package
from kvgraph.errors import (
    ArtifactError,
    RequestError,
    UnsupportedError,
)
from kvgraph.kv.memory import DEFAULT_BATCH_SIZE, DEFAULT_BATCH_TOKENS, ONNX_BATCH_TOKENS
from kvgraph.progress import listening
from kvgraph.serve.options import ServeOptions
from kvgraph.signal_handlers import end_at_signals

if TYPE_CHECKING:
    from kvgraph.runtime.artifact import Artifact
    from kvgraph.runtime.engine import Engine

ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^/?#\s,A-Z]+")
METRIC_NAME = re.compile("[a-zA-Z_:][a-zA-Z0-9_:]*")
COMPUTE_NICE = 15
"""Added niceness of compute threads: answers take about 4 ms while all processors compute. 0 with
several ranks, since a slower rank delays the others."""

NEEDED = ("starlette", "uvicorn", "httptools", "uvloop", "msgspec", "prometheus_client")


GenerationConfig = StrEnum("GenerationConfig", ("auto", "none"))
DEFAULTS = ServeOptions()


@end_at_signals(0)  # until the server has its own handlers
def serve(
    artifact: ArtifactFolder,
    host: Annotated[str, typer.Option(help="Address to listen at.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen at; 0 takes a free one.")] = 8000,
    uds: Annotated[
        Path | None,
        typer.Option(
            metavar="<path>", parser=named, help="Unix socket to listen at, instead of an address."
        ),
    ] = None,
    keep_alive_seconds: Annotated[
        int,
        typer.Option(min=1, help="Time that an idle connection stays open: more than a proxy's."),
    ] = DEFAULTS.keep_alive_seconds,
    max_queued_requests: Annotated[
        int, typer.Option(min=0, help="Most requests that wait for a row or for pages.")
    ] = DEFAULTS.max_queued_requests,
    max_queued_tokens: Annotated[
        int | None,
        typer.Option(min=0, help="Most prompt tokens that wait [default: 16 steps of prefill]."),
    ] = None,
    api_key_file: Annotated[
        Path | None,
        typer.Option(
            metavar="<path>",
            parser=named,
            help="File of API keys, one a line, read once at the start [default: no key].",
        ),
    ] = None,
    drain_seconds: Annotated[
        float, typer.Option(min=0, help="Time for running requests after SIGTERM.")
    ] = DEFAULTS.drain_seconds,
    metrics_prefix: Annotated[
        str, typer.Option(help="Prefix of metric names; `vllm:` makes dashboards for vLLM work.")
    ] = DEFAULTS.metrics_prefix,
    kv_events: Annotated[
        str | None,
        typer.Option(help="ZeroMQ endpoint that tells routers of pages: tcp://*:5557."),
    ] = None,
    kv_events_replay: Annotated[
        str | None, typer.Option(help="Endpoint to ask for missed events: tcp://*:5558.")
    ] = None,
    kv_events_topic: Annotated[str, typer.Option(help="Topic of the events.")] = (
        DEFAULTS.kv_events_topic
    ),
    allowed_origins: Annotated[
        list[str] | None,
        typer.Option(
            help="Origin that a browser may send requests from, such as https://example.com; * for "
            "all. May be repeated."
        ),
    ] = None,
    generation_config: Annotated[
        GenerationConfig,
        typer.Option(
            help="auto: a request that does not say how to sample gets the model's own settings, "
            "of its generation_config.json; none: OpenAI's."
        ),
    ] = GenerationConfig.auto,
    stream_interval: Annotated[
        int,
        typer.Option(
            min=1,
            max=1024,
            help="Fewest tokens of a stream's frame, but for the first and the last: more of them "
            "cost less time.",
        ),
    ] = DEFAULTS.stream_interval,
    log_prompts: Annotated[
        bool, typer.Option("--log-prompts", help="Write prompts into the log.")
    ] = False,
    max_batch_size: Annotated[
        int, typer.Option(min=1, help="Most rows of a step.")
    ] = DEFAULT_BATCH_SIZE,
    max_batch_tokens: Annotated[
        int | None,
        typer.Option(
            min=1,
            help=f"Most new tokens of a step [default: {ONNX_BATCH_TOKENS} with onnx on cpu, else "
            f"{DEFAULT_BATCH_TOKENS}].",
        ),
    ] = None,
    max_prefill_tokens: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Most prompt tokens of a step in which rows decode [default: by its time].",
        ),
    ] = None,
    nice: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=19,
            help="Niceness of compute threads, so that answers come first "
            f"[default: {COMPUTE_NICE}; on a GPU or with ranks, 0].",
        ),
    ] = None,
    num_pages: NumPages = None,
    cache_memory: Annotated[
        str | None,
        typer.Option(help=f"Memory of the pool, such as 4GiB {POOL_MEMORY}"),
    ] = None,
    host_memory: HostMemory = None,
    disk: DiskFolder = None,
    disk_bytes: DiskBytes = None,
    remote: RemoteServer = None,
    threads: Threads = None,
    collective_timeout: CollectiveTimeout = None,
    verify: Verify = False,
    replicas: Annotated[
        int | None, typer.Option(min=1, help="Engines on Ray, of RAY_ADDRESS or of this machine.")
    ] = None,
    max_replicas: Annotated[
        int | None, typer.Option(min=1, help="Engines that Ray may start as requests wait.")
    ] = None,
    prefill_replicas: Annotated[
        int, typer.Option(min=0, help="Engines that compute long prompts for --replicas.")
    ] = 0,
) -> None:
    """Serve an artifact over HTTP, as OpenAI's clients ask; SIGTERM drains it."""
    for name in NEEDED:
        require_package(name, "needed to serve", "pip install 'kvgraph[serve]'")
    from kvgraph.runtime.artifact import load, read
    from kvgraph.serve.log import LinesOfTasks
    from kvgraph.serve.server import serve as serve_engine

    if not METRIC_NAME.fullmatch(f"{metrics_prefix}x"):
        raise RequestError(
            "--metrics-prefix: expected letters, digits, _ and :, not a digit first, got "
            f"{metrics_prefix!r}"
        )
    if kv_events is None and kv_events_replay is not None:
        raise RequestError("--kv-events-replay: expected --kv-events beside it, got none")
    if replicas is None:
        _require_one(max_replicas, prefill_replicas)
    else:
        _require_replicas(replicas, max_replicas, kv_events, nice, uds)
        if prefill_replicas and disk is None and remote is None:
            raise RequestError(
                "--prefill-replicas: expected --disk or --remote, through which pages go, got none"
            )
    options = ServeOptions(
        max_queued_requests=max_queued_requests,
        max_queued_tokens=max_queued_tokens,
        api_keys=_read_keys(api_key_file) if api_key_file else (),
        drain_seconds=drain_seconds,
        keep_alive_seconds=keep_alive_seconds,
        metrics_prefix=metrics_prefix,
        stream_interval=stream_interval,
        log_prompts=log_prompts,
        uses_generation_config=generation_config is GenerationConfig.auto,
        allowed_origins=_origins(allowed_origins or []),
        kv_events=kv_events,
        kv_events_replay=kv_events_replay,
        kv_events_topic=text_of("--kv-events-topic", kv_events_topic),
    )
    if replicas is None:
        loaded = read(artifact, verify=verify or None)
    else:  # once, before every replica would
        with listening(LinesOfTasks()):
            loaded = load(artifact, verify=verify or None)
    is_cuda = Target.parse(loaded.manifest.target).kind == "cuda"
    if replicas is None and follows(loaded, None, threads, collective_timeout):
        return
    name = Path(os.path.abspath(artifact)).name.removesuffix(".kvg")
    settings = {
        "max_batch_size": max_batch_size,
        "max_batch_tokens": max_batch_tokens,
        "max_prefill_tokens": max_prefill_tokens or "auto",
        "num_pages": num_pages,
        "cache_memory": cache_memory,
        "host_memory": 0 if host_memory is None else host_memory,
        "disk": disk,
        "disk_bytes": disk_bytes,
        "remote": remote,
    }
    if replicas is None:
        make = partial(_engine, loaded, collective_timeout, settings, threads)
        if nice is None:
            nice = 0 if is_cuda or loaded.ranks > 1 else COMPUTE_NICE
        serve_engine(name, make, replace(options, nice=nice), host=host, port=port, uds=uds)
        return
    if is_cuda and loaded.ranks > 1:
        raise UnsupportedError(
            f"--replicas: expected a CUDA artifact of one rank, got {loaded.ranks}; start one "
            "server for each with torchrun"
        )
    from kvgraph.serve.replicas.application import ReplicaOptions, serve_replicas

    folder = artifact.resolve()
    identity = loaded.manifest.identity
    serve_replicas(
        name,
        folder,
        partial(_replica, folder, identity, verify, collective_timeout, settings),
        options,
        ReplicaOptions(
            replicas,
            max_replicas or replicas,
            max_batch_size,
            threads,
            int(is_cuda),
            prefill_replicas,
        ),
        host=host,
        port=port,
    )


def _engine(
    loaded: Artifact,
    collective_timeout: float | None,
    settings: Mapping[str, Any],
    threads: int | None,
) -> Engine:
    """Check the files and create the engine. Call it in the thread that runs the engine, since the
    session is opened there."""
    from kvgraph.runtime.engine import Engine

    session = loaded.session(num_threads=threads, collective_timeout=collective_timeout)
    return Engine(loaded, session=session, **settings)


def _replica(
    folder: Path,
    identity: bytes,
    verify: bool,
    collective_timeout: float | None,
    settings: Mapping[str, Any],
    threads: int,
) -> Engine:
    """Create a replica's engine in its process, which may be on another machine.

    ArtifactError if `folder` has another model there."""
    from kvgraph.runtime.artifact import load

    loaded = load(folder, verify=verify or None)
    if loaded.manifest.identity != identity:
        raise ArtifactError(
            f"{folder}: expected the model that this command was given, got another one"
        )
    return _engine(loaded, collective_timeout, settings, threads)


def _require_one(max_replicas: int | None, prefill_replicas: int) -> None:
    """Raise RequestError for options that need several engines."""
    given = {"--max-replicas": max_replicas, "--prefill-replicas": prefill_replicas}
    for name, value in given.items():
        if value:
            raise RequestError(f"{name}: expected --replicas beside it, got none")


def _require_replicas(
    least: int, most: int | None, kv_events: str | None, nice: int | None, uds: Path | None
) -> None:
    """Raise an error for options that do not fit several engines, and without Ray."""
    if most is not None and most < least:
        raise RequestError(f"--max-replicas: expected at least --replicas={least}, got {most}")
    if kv_events is not None:
        raise RequestError("--kv-events: expected one engine, got --replicas")
    if nice is not None:
        raise RequestError("--nice: expected one engine, got --replicas")
    if uds is not None:
        raise RequestError("--uds: expected one engine, got --replicas")
    require_package("ray", "needed for --replicas", "pip install 'kvgraph[ray]'")


def _origins(given: list[str]) -> tuple[str, ...]:
    """Check origins; RequestError for text that browsers never send as an origin."""
    for origin in given:
        if origin != "*" and not ORIGIN.fullmatch(origin):
            raise RequestError(
                "--allowed-origins: expected * or an origin such as https://example.com, without "
                f"a path, got {origin!r}"
            )
    return tuple(given)


def _read_keys(path: Path) -> tuple[str, ...]:
    """Read API keys. RequestError for a file without keys: it would admit every client."""
    require_file("--api-key-file", path)
    try:
        lines = path.read_text("ascii").splitlines()
    except UnicodeDecodeError as error:
        raise RequestError(f"{path}: expected API keys in ASCII, got {error}") from error
    keys = tuple(line.strip() for line in lines if line.strip())
    if not keys:
        raise RequestError(f"{path}: expected an API key on a line, got none")
    return keys
