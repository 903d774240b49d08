"""Starts the replicas on Ray, and stops them on a signal."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
import urllib.request
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import FrameType

import ray
from ray import serve
from ray.actor import ActorHandle
from ray.exceptions import ActorAlreadyExistsError, RayError
from ray.serve.config import AutoscalingConfig, HTTPOptions, RequestRouterConfig
from starlette.applications import Starlette

from kvgraph.errors import RequestError
from kvgraph.runtime.chat import prompts_of
from kvgraph.runtime.engine import Engine
from kvgraph.serve.log import write_line
from kvgraph.serve.options import ServeOptions
from kvgraph.serve.replicas.actors import EngineReplica, ingress_app, start_index, start_lock
from kvgraph.serve.replicas.address import hold
from kvgraph.serve.replicas.report import DECODE, PREFILL
from kvgraph.serve.replicas.router import PageRouter
from kvgraph.serve.replicas.statuses import StatusLog, logged_statuses, reason_of
from kvgraph.serve.server import url_of
from kvgraph.serve.stderr import write_text, written_behind
from kvgraph.signal_handlers import is_heard

APPLICATION = "kvgraph"
NAMESPACE = "kvgraph"
LOCK = "kvgraph-command"
UNBOUNDED = 1 << 20
"""Most requests that Ray sends to a replica: unlimited, as the ingress bounds them."""

START_SECONDS = 60
"""Time for Serve's proxy to start. Serve's default is 5 s, after which it restarts the proxy."""

CUT_SECONDS = 5.0
"""Extra time for cut requests to report their error, before Ray ends the processes."""

HEALTH_SECONDS = 2.0
HEALTH_TIMEOUT_SECONDS = 5.0
"""Time for the answer to a health check; Serve replaces a process after three failures."""
LOOK_SECONDS = 0.5
STOP_SECONDS = 20.0
"""Extra time for Ray's own processes to end."""

ASK_SECONDS = 2.0
"""Time in which the index must give lines of the log, and in which a cluster can still be asked to
end the replicas after a second signal."""

OBJECT_STORE_BYTES = 256 << 20
"""Size of the object store of a Ray that is started here; messages are small."""


@dataclass(frozen=True, slots=True)
class ReplicaOptions:
    """Number of replicas, and resources of each.

    If `most` exceeds `least`, Ray adds replicas while requests exceed rows, and removes them later.
    """

    least: int
    most: int
    rows: int
    """Most requests that one replica runs at once; further ones wait."""
    threads: int | None = None
    """Cores of each replica; None: an equal share of Ray's."""
    gpus: int = 0
    prefill: int = 0
    """Number of additional replicas that compute long prompts, over a tier that all share."""


@dataclass(slots=True)
class _Ending:
    """Events that are set by the first and the second signal."""

    first: threading.Event = field(default_factory=threading.Event)
    second: threading.Event = field(default_factory=threading.Event)

    def listen(self) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._handle)
        if is_heard(signal.SIGHUP):
            signal.signal(signal.SIGHUP, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.first.is_set():
            if number != signal.SIGHUP:  # shell and kernel may each send a SIGHUP
                self.second.set()
            return
        write_line({"event": "draining", "signal": signal.Signals(number).name})
        self.first.set()


@written_behind()
def serve_replicas(
    name: str,
    folder: Path,
    make: Callable[[int], Engine],
    options: ServeOptions,
    replicas: ReplicaOptions,
    *,
    host: str,
    port: int,
) -> None:
    """Serve until SIGTERM, SIGINT or SIGHUP. `make(threads)` creates an engine, in the process of
    each replica.

    RAY_ADDRESS names the cluster; without it, Ray is started on this machine. RequestError with the
    first error if no replica starts; OSError if the address is not available.
    """
    uses_config = options.uses_generation_config
    sampling = prompts_of(folder).suggested_fields() if uses_config else {}
    ending = _Ending()
    ending.listen()
    _connect()
    ending.listen()  # Ray takes SIGTERM over
    index: ActorHandle | None = None
    try:
        _lock = _require_alone()  # released with its last handle
        with hold(host, port) as held:
            host, port = held.getsockname()[:2]
            if os.environ.get("RAY_ADDRESS"):
                held.close()  # the cluster may run as another user, whose proxy needs the address
            if ending.first.is_set():
                return
            index = start_index(APPLICATION, NAMESPACE)
            _start_serve(host, port, options.keep_alive_seconds)
            if ending.first.is_set():
                return
            write_line({"event": "listening", "url": url_of(host, port)})
            application = _application(name, folder, make, options, replicas, index)
            target = serve.RunTarget(application, name=APPLICATION, route_prefix="/")
            serve.run_many([target], wait_for_applications_running=False)
            if _wait_until_ready(ending, f"{url_of(_own(host), port)}/ready"):
                line = {"event": "ready", "model": name, "replicas": replicas.least}
                write_line(line | ({"sampling": sampling} if sampling else {}))
                with logged_statuses(APPLICATION, LOOK_SECONDS):
                    while not ending.first.wait(LOOK_SECONDS):
                        _require_ray()
                        _write_lines(index)
                _drain(index, options, ending)
    finally:
        _stop(index, options, ending)


def _connect() -> None:
    logging.getLogger("ray.serve").setLevel(logging.ERROR)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S", str(START_SECONDS))
    where: dict[str, object] = {"log_to_driver": False, "logging_level": "ERROR"}
    address = os.environ.get("RAY_ADDRESS")
    if not address:
        where |= {"address": "local", "include_dashboard": False}
        where["object_store_memory"] = OBJECT_STORE_BYTES
    try:
        ray.init(**where)
    except Exception as error:  # Ray raises bare Exception if a process starts too slowly
        expected = "ray: expected its processes to start on this machine"
        if address:
            expected = f"RAY_ADDRESS={address}: expected a Ray cluster"
        raise RequestError(f"{expected}, got {_first_line(error)}") from error


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def _require_alone() -> ActorHandle | None:
    """Take the lock of the cluster at RAY_ADDRESS, and end what an earlier command left behind.

    RequestError if another command has the lock, or Serve already has applications, which use its
    address.
    """
    expected = "--replicas: expected a cluster on which Ray Serve runs nothing"
    lock: ActorHandle | None = None
    if os.environ.get("RAY_ADDRESS"):
        try:
            lock = start_lock(LOCK, NAMESPACE)
        except ActorAlreadyExistsError as error:
            raise RequestError(f"{expected}, got another `kvgraph serve --replicas`") from error
    with suppress(RayError):  # Serve does not run yet
        if others := list(serve.status().applications):
            raise RequestError(f"{expected}, got {others}; end them with `serve shutdown`")
        serve.shutdown()
    with suppress(ValueError):  # there is no such actor
        ray.kill(ray.get_actor(APPLICATION, namespace=NAMESPACE))
    return lock


def _start_serve(host: str, port: int, keep_alive_seconds: int) -> None:
    try:
        serve.start(
            http_options=HTTPOptions(host=host, port=port, keep_alive_timeout_s=keep_alive_seconds),
            logging_config={"log_level": "ERROR", "enable_access_log": False},
        )
    except (RayError, TimeoutError) as error:
        raise RequestError(
            f"ray: expected the proxy of Ray Serve to start within {START_SECONDS} s, got "
            f"{type(error).__name__}: {_first_line(error)}"
        ) from error


def _application(
    name: str,
    folder: Path,
    make: Callable[[int], Engine],
    options: ServeOptions,
    replicas: ReplicaOptions,
    index: ActorHandle,
) -> serve.Application:
    share = ray.cluster_resources().get("CPU", 1.0) / (replicas.most + replicas.prefill)
    threads = replicas.threads or max(1, int(share))
    make_one = partial(make, threads)
    cores = {"num_cpus": min(threads, share), "num_gpus": replicas.gpus}
    engines = {DECODE: _deployment(DECODE, _scale(replicas), cores, options)}
    if replicas.prefill:
        fixed: dict[str, object] = {"num_replicas": replicas.prefill}
        engines[PREFILL] = _deployment(PREFILL, fixed, cores, options)
    roles = list(engines)

    def app() -> Starlette:
        return ingress_app(name, folder, options, index, APPLICATION, roles)

    ingress = serve.deployment(serve.ingress(app)(_Ingress), name="ingress").options(
        max_ongoing_requests=UNBOUNDED,
        ray_actor_options={"num_cpus": 0},
        graceful_shutdown_timeout_s=options.drain_seconds + CUT_SECONDS,
        health_check_period_s=HEALTH_SECONDS,
        health_check_timeout_s=HEALTH_TIMEOUT_SECONDS,
    )
    return ingress.bind([engines[role].bind(index, make_one, role) for role in roles])


def _scale(replicas: ReplicaOptions) -> dict[str, object]:
    if replicas.most <= replicas.least:
        return {"num_replicas": replicas.least}
    scaling = AutoscalingConfig(
        min_replicas=replicas.least,
        max_replicas=replicas.most,
        target_ongoing_requests=replicas.rows,
    )
    return {"autoscaling_config": scaling}


def _deployment(
    role: str, scale: dict[str, object], cores: dict[str, float], options: ServeOptions
) -> serve.Deployment:
    index = {"name": APPLICATION, "namespace": NAMESPACE}
    return serve.deployment(EngineReplica, name=role).options(
        **scale,
        max_ongoing_requests=UNBOUNDED,
        ray_actor_options=cores,
        request_router_config=RequestRouterConfig(
            request_router_class=PageRouter, request_router_kwargs=index
        ),
        health_check_period_s=HEALTH_SECONDS,
        health_check_timeout_s=HEALTH_TIMEOUT_SECONDS,
        graceful_shutdown_timeout_s=options.drain_seconds + CUT_SECONDS,
        max_constructor_retry_count=1,
    )


class _Ingress:
    """Ingress deployment; Serve adds the routes. The argument makes Serve start replicas first."""

    app: Starlette
    """Set by Serve."""

    def __init__(self, replicas: list[object]) -> None:
        pass

    def check_health(self) -> None:
        """Raise if the ingress can no longer become ready; Ray then replaces it."""
        self.app.state.service.require_running()


def _wait_until_ready(ending: _Ending, url: str) -> bool:
    """Wait for the server; False if a signal came first. RequestError if no replica starts."""
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # ignores http_proxy
    log = StatusLog()
    while not ending.first.wait(LOOK_SECONDS):
        _require_ray()
        found = serve.status().applications.get(APPLICATION)
        if found is not None and found.status in ("DEPLOY_FAILED", "UNHEALTHY"):
            raise RequestError(f"--replicas: expected replicas that start, got {reason_of(found)}")
        if found is not None:
            log.look(found)  # a replica that waits for resources may wait for ever
        with suppress(OSError), direct.open(url, timeout=5):
            return True
    return False


def _own(host: str) -> str:
    """The host at which this machine reaches a server that listens at `host`."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)


def _require_ray() -> None:
    if _has_lost_ray():
        raise RequestError("ray: expected its processes to run, got one that has ended")


def _write_lines(index: ActorHandle) -> None:
    """Write the lines of the ingress's log to stderr."""
    with suppress(Exception):  # the index may restart
        for line in ray.get(index.lines.remote(), timeout=ASK_SECONDS):
            write_text(line)


def _drain(index: ActorHandle, options: ServeOptions, ending: _Ending) -> None:
    """Wait until no request runs. Replicas that Ray stops would lose requests on their way.

    A second signal, or the loss of Ray, ends the wait.
    """
    end = time.monotonic() + options.drain_seconds + CUT_SECONDS
    while time.monotonic() < end and not _has_lost_ray():
        with suppress(Exception):  # the index may restart
            has_drained = ray.get(index.drain.remote(), timeout=CUT_SECONDS)
            _write_lines(index)
            if has_drained:
                return
        if ending.second.wait(0.1):
            return


def _stop(index: ActorHandle | None, options: ServeOptions, ending: _Ending) -> None:
    """Stop all that this command has started; without an index only its connection to Ray.

    Running requests, if the server was not ready, first end within each deployment's time. A second
    signal, or the loss of Ray, ends the wait.
    """

    def stop() -> None:
        if index is not None:
            _end_serve(index, ending)
        ray.shutdown()

    stopping = threading.Thread(target=stop, daemon=True)
    stopping.start()
    longest = options.drain_seconds + CUT_SECONDS
    end = time.monotonic() + 2 * longest + CUT_SECONDS + STOP_SECONDS
    while stopping.is_alive() and time.monotonic() < end:
        if _has_lost_ray():
            break
        if ending.second.is_set():
            stopping.join(ASK_SECONDS)
            break
        stopping.join(0.1)


def _end_serve(index: ActorHandle, ending: _Ending) -> None:
    with suppress(Exception):
        if not ending.second.is_set():
            ray.get(index.drain.remote(), timeout=CUT_SECONDS)
    with suppress(Exception):  # Serve waits for at most a minute
        serve.delete(APPLICATION)
    _write_lines(index)  # of requests that ended meanwhile
    with suppress(Exception):
        if os.environ.get("RAY_ADDRESS"):
            serve.shutdown()
    with suppress(Exception):
        ray.kill(index)


def _has_lost_ray() -> bool:
    """Whether a process of the Ray that was started here has ended unexpectedly.

    Calls to Ray would then block for a minute.
    """
    try:
        return os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:  # no children: the cluster was not started here
        return False
