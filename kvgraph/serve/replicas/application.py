"""Starts the replicas on Ray, and ends them as told."""

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
from ray.serve.schema import ApplicationStatusOverview
from starlette.applications import Starlette

from kvgraph.errors import RequestError
from kvgraph.runtime.chat import Prompts
from kvgraph.runtime.engine import Engine
from kvgraph.serve.log import write_line
from kvgraph.serve.options import ServeOptions
from kvgraph.serve.replicas.actors import EngineReplica, ingress_app, start_index, start_lock
from kvgraph.serve.replicas.address import hold
from kvgraph.serve.replicas.report import DECODE, PREFILL
from kvgraph.serve.replicas.router import PageRouter
from kvgraph.serve.server import url_of

APPLICATION = "kvgraph"
NAMESPACE = "kvgraph"
LOCK = "kvgraph-command"
UNBOUNDED = 1 << 20
"""Requests of a replica: the ingress holds what is too much."""

START_SECONDS = 60
"""For Serve's proxy to start. Serve kills one that takes longer than 5, and starts it again."""

CUT_SECONDS = 5.0
"""For requests to say that they were cut, behind their own time; then Ray ends the processes."""

HEALTH_SECONDS = 2.0
HEALTH_TIMEOUT_SECONDS = 5.0
"""For an answer to a check; Serve starts another process for one that gave none three times."""
LOOK_SECONDS = 0.5
STOP_SECONDS = 20.0
"""For Ray's own processes to end, behind the time of requests."""

ASK_SECONDS = 2.0
"""For a cluster to be asked to end the replicas, behind a second signal."""

OBJECT_STORE_BYTES = 256 << 20
"""Of a Ray that is started here; what travels is small."""


@dataclass(frozen=True, slots=True)
class ReplicaOptions:
    """How many replicas there are, and what each of them takes.

    `most` above `least` lets Ray add replicas while there are more requests than rows, and take
    them away again.
    """

    least: int
    most: int
    rows: int
    """Most requests that one runs at once: others wait."""
    threads: int | None = None
    """Cores of one; None: an equal share of those that Ray knows."""
    gpus: int = 0
    prefill: int = 0
    """Replicas besides these that compute long prompts for them, over a tier that all share."""


@dataclass(slots=True)
class _Ending:
    """Set by the first signal, and by the second one."""

    first: threading.Event = field(default_factory=threading.Event)
    second: threading.Event = field(default_factory=threading.Event)

    def listen(self) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._handle)
        if signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:  # not under nohup
            signal.signal(signal.SIGHUP, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.first.is_set():
            if number != signal.SIGHUP:  # a shell and the kernel send one each
                self.second.set()
            return
        write_line({"event": "draining", "signal": signal.Signals(number).name})
        self.first.set()


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
    """Serve until SIGTERM, SIGINT or SIGHUP. `make` gives the engine of so many threads, in the
    process of each replica.

    A cluster is the one of RAY_ADDRESS; without it, Ray is started on this machine. RequestError
    where no replica starts, with the sentence of the first that did not; OSError for an address
    that cannot be had.
    """
    sampling = Prompts(folder).suggested_fields() if options.uses_generation_config else {}
    ending = _Ending()
    _connect()
    index: ActorHandle | None = None
    try:
        _lock = _require_alone()  # Ray ends it with its last handle
        with hold(host, port) as held:
            host, port = held.getsockname()[:2]
            if os.environ.get("RAY_ADDRESS"):
                held.close()  # the cluster's user, who may be another one, could not listen there
            index = start_index(APPLICATION, NAMESPACE)
            _start_serve(host, port)
            write_line({"event": "listening", "url": url_of(host, port)})
            ending.listen()
            application = _application(name, folder, make, options, replicas, index)
            target = serve.RunTarget(application, name=APPLICATION, route_prefix="/")
            serve.run_many([target], wait_for_applications_running=False)
            if _wait_until_ready(ending, f"{url_of(_own(host), port)}/ready"):
                line = {"event": "ready", "model": name, "replicas": replicas.least}
                write_line(line | ({"sampling": sampling} if sampling else {}))
                while not ending.first.wait(LOOK_SECONDS):
                    _require_ray()
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
    except Exception as error:  # Ray raises that itself where a process starts too slowly
        expected = "ray: expected its processes to start on this machine"
        if address:
            expected = f"RAY_ADDRESS={address}: expected a Ray cluster"
        raise RequestError(f"{expected}, got {_first_line(error)}") from error


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def _require_alone() -> ActorHandle | None:
    """Take the lock of a cluster of RAY_ADDRESS, and end what an earlier command left behind.

    RequestError where another command has the lock, or where Serve has applications: its address is
    theirs.
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
    with suppress(ValueError):  # there is none
        ray.kill(ray.get_actor(APPLICATION, namespace=NAMESPACE))
    return lock


def _start_serve(host: str, port: int) -> None:
    try:
        serve.start(
            http_options=HTTPOptions(host=host, port=port),
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
    """Serve gives it the routes; its argument makes Serve start the replicas first."""

    app: Starlette
    """Serve's."""

    def __init__(self, replicas: list[object]) -> None:
        pass

    def check_health(self) -> None:
        """Ray asks, and replaces an ingress that cannot be ready any more."""
        self.app.state.service.require_running()


def _wait_until_ready(ending: _Ending, url: str) -> bool:
    """False where a signal came first. RequestError where a replica cannot start."""
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # whatever http_proxy is
    while not ending.first.wait(LOOK_SECONDS):
        _require_ray()
        found = serve.status().applications.get(APPLICATION)
        if found is not None and found.status in ("DEPLOY_FAILED", "UNHEALTHY"):
            raise RequestError(f"--replicas: expected replicas that start, got {_why(found)}")
        with suppress(OSError), direct.open(url, timeout=5):
            return True
    return False


def _own(host: str) -> str:
    """Where this machine reaches a server of `host`."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)


def _require_ray() -> None:
    if _has_lost_ray():
        raise RequestError("ray: expected its processes to run, got one that has ended")


def _why(found: ApplicationStatusOverview) -> str:
    """The error of the first replica that did not start, without its traceback."""
    for deployment in found.deployments.values():
        lines = [line.strip() for line in deployment.message.splitlines() if line.strip()]
        errors = [line for line in lines if line.startswith("kvgraph.errors.")]
        if errors:
            return str(errors[-1].partition(": ")[2])
        if lines and deployment.status not in ("HEALTHY", "UPDATING"):
            return str(lines[-1])
    return str(found.message)


def _drain(index: ActorHandle, options: ServeOptions, ending: _Ending) -> None:
    """Wait until no request runs: replicas that Ray is told to end take none that is on its way.

    A second signal, or a Ray that has died, ends the wait.
    """
    end = time.monotonic() + options.drain_seconds + CUT_SECONDS
    while time.monotonic() < end and not _has_lost_ray():
        with suppress(Exception):  # it is being restarted
            if ray.get(index.drain.remote(), timeout=CUT_SECONDS):
                return
        if ending.second.wait(0.1):
            return


def _stop(index: ActorHandle | None, options: ServeOptions, ending: _Ending) -> None:
    """End what this command has started. Without an index that is no more than its use of Ray.

    Requests that run still (it was not ready yet) end first, for as long as each deployment gives
    them. A second signal, or a Ray that has died, ends the wait.
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
    with suppress(Exception):  # Serve waits for a minute at most
        serve.delete(APPLICATION)
    with suppress(Exception):
        if os.environ.get("RAY_ADDRESS"):
            serve.shutdown()
    with suppress(Exception):
        ray.kill(index)


def _has_lost_ray() -> bool:
    """Whether a process of the Ray that was started here has ended, unasked.

    Its calls wait for a minute then.
    """
    try:
        return os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:  # there are none: the cluster is another one's
        return False
