"""What the command asks of Ray as it is refused, waits and ends; Ray itself is not there."""

from __future__ import annotations

import http.server
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("ray", reason="pip install 'kvgraph[ray]'")

from ray.exceptions import ActorAlreadyExistsError

from kvgraph import RequestError
from kvgraph.runtime.chat import Prompts
from kvgraph.serve.options import ServeOptions
from kvgraph.serve.replicas.index import RoutingIndex
from kvgraph.serve.server import listen

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # Ray's own, of pydantic
    from kvgraph.serve.replicas import application
    from kvgraph.serve.replicas.application import ReplicaOptions, _Ending

REQUIRE_ALONE = application._require_alone

SECONDS = 60.0
"""A wait that is longer has failed."""

ENDED = ["serve.run_many", "serve.delete", "serve.shutdown", "ray.kill", "ray.shutdown"]


class Cluster:
    """Notes what it is asked; `fault(name)` may raise. Its index is an object of this process."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.index: Any = SimpleNamespace(drain=SimpleNamespace(remote=self._drain))
        self.fault: Callable[[str], None] = lambda name: None
        self._index = RoutingIndex()
        self.drains = 0
        self.drains_left = 3
        """Answers to `drain` before the ingress has said that it has ended."""

    def _drain(self) -> bool:
        self.drains += 1
        if self.drains > self.drains_left:
            self._index.end_drain()
        return self._index.drain()

    def note(self, name: str) -> Callable[..., None]:
        def asked(*given: Any, **named: Any) -> None:
            self.asked.append(name)
            self.fault(name)

        return asked


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    made = Cluster()
    monkeypatch.setattr(application, "_has_lost_ray", lambda: False)
    monkeypatch.setattr(application.ray, "get", lambda value, timeout: value)
    for name in ("serve.delete", "serve.shutdown", "serve.run_many", "ray.kill", "ray.shutdown"):
        module, _, function = name.partition(".")
        monkeypatch.setattr(getattr(application, module), function, made.note(name))
    monkeypatch.setattr(application, "_connect", lambda: None)
    monkeypatch.setattr(application, "prompts_of", Prompts)
    monkeypatch.setattr(application, "_require_alone", lambda: "lock")
    monkeypatch.setattr(application, "_start_serve", lambda *address: None)
    monkeypatch.setattr(application, "_application", lambda *given: None)
    monkeypatch.setattr(application.serve, "RunTarget", lambda *given, **named: None)
    monkeypatch.setattr(application, "start_index", lambda *name: made.index)
    monkeypatch.setenv("RAY_ADDRESS", "somewhere")
    return made


def run(
    monkeypatch: pytest.MonkeyPatch, until_ready: Callable[[_Ending], bool], **options: Any
) -> None:
    """The command; `until_ready` may send signals."""
    monkeypatch.setattr(_Ending, "listen", lambda ending: None)
    monkeypatch.setattr(application, "_wait_until_ready", lambda ending, url: until_ready(ending))
    application.serve_replicas(
        "m",
        Path("m.kvg"),
        lambda threads: pytest.fail("nothing is started"),
        ServeOptions(**options),
        ReplicaOptions(1, 1, 64),
        host="127.0.0.1",
        port=0,
    )


def test_a_command_that_is_refused_ends_nothing(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the cluster serves is another one's."""

    def refuse() -> None:
        raise RequestError("--replicas: expected a cluster on which Ray Serve runs nothing")

    monkeypatch.setattr(application, "_require_alone", refuse)
    with pytest.raises(RequestError, match="runs nothing"):
        run(monkeypatch, lambda ending: True)
    assert cluster.asked == ["ray.shutdown"]
    assert cluster.drains == 0


@pytest.mark.parametrize("address", ["", "somewhere"])
def test_the_address_is_kept_on_a_ray_of_its_own(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch, address: str
) -> None:
    """Until Ray's proxy listens and beyond. The user of another cluster could not share it."""
    monkeypatch.setenv("RAY_ADDRESS", address)
    kept: list[bool] = []

    def start(host: str, port: int, keep_alive_seconds: int) -> None:
        try:
            listen(host, port).close()
        except OSError:
            kept.append(True)
        else:
            kept.append(False)

    monkeypatch.setattr(application, "_start_serve", start)
    run(monkeypatch, lambda ending: False)
    assert kept == [not address]


class Lock:
    """Ray's name of an actor, which commands of a cluster take."""

    def __init__(self) -> None:
        self.held: list[str] = []

    def start(self, name: str, namespace: str) -> str:
        if name in self.held:
            raise ActorAlreadyExistsError(f"The name {name} is already taken")
        self.held.append(name)
        return name


@pytest.fixture
def lock(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> Lock:
    """`_require_alone` as it is, on a cluster where Serve runs nothing."""
    made = Lock()
    monkeypatch.setattr(application, "_require_alone", REQUIRE_ALONE)
    monkeypatch.setattr(application, "start_lock", made.start)
    monkeypatch.setattr(application.ray, "get_actor", lambda name, namespace: name)
    monkeypatch.setattr(application.serve, "status", lambda: SimpleNamespace(applications={}))
    return made


def test_a_command_that_starts_is_not_ended_by_another(
    cluster: Cluster, lock: Lock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first has no application yet."""

    def second(*address: object) -> None:
        monkeypatch.setattr(application, "_start_serve", lambda *address: None)
        cluster.asked.clear()
        with pytest.raises(RequestError, match="got another `kvgraph serve --replicas`"):
            run(monkeypatch, lambda ending: False)
        assert cluster.asked == ["ray.shutdown"], "neither Serve nor the index"

    monkeypatch.setattr(application, "_start_serve", second)
    run(monkeypatch, lambda ending: False)
    assert "serve.run_many" in cluster.asked, "the first goes on"


def test_the_lock_comes_before_anything_is_ended(cluster: Cluster, lock: Lock) -> None:
    held: list[int] = []
    cluster.fault = lambda name: held.append(len(lock.held))
    assert application._require_alone() == application.LOCK
    assert cluster.asked == ["serve.shutdown", "ray.kill"], "what an earlier command left behind"
    assert held == [1, 1]


def test_a_ray_of_its_own_needs_no_lock(
    cluster: Cluster, lock: Lock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_ADDRESS")
    assert application._require_alone() is None
    assert lock.held == []


def test_replicas_are_there_until_the_drain_has_ended(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    drains: list[int] = []

    def fault(name: str) -> None:
        if name == "serve.delete":
            drains.append(cluster.drains)

    def signalled(ending: _Ending) -> bool:
        ending.first.set()
        return True

    cluster.fault = fault
    run(monkeypatch, signalled)
    assert cluster.asked == ENDED
    assert drains[0] > cluster.drains_left, "the index was asked until it said so"


def test_a_second_signal_waits_for_no_drain(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cluster is asked to end the replicas all the same."""
    cluster.drains_left = 10**9

    def signalled(ending: _Ending) -> bool:
        ending.first.set()
        ending.second.set()
        return True

    run(monkeypatch, signalled, drain_seconds=SECONDS)
    assert cluster.drains == 1
    assert "serve.delete" in cluster.asked


def test_a_drain_of_which_nobody_tells_ends(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster.drains_left = 10**9
    monkeypatch.setattr(application, "CUT_SECONDS", 0.01)

    def signalled(ending: _Ending) -> bool:
        ending.first.set()
        return True

    run(monkeypatch, signalled, drain_seconds=0.2)
    assert "serve.delete" in cluster.asked


def test_what_comes_before_it_is_ready_waits_for_no_drain(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster.drains_left = 10**9
    run(monkeypatch, lambda ending: False, drain_seconds=SECONDS)
    assert "serve.delete" in cluster.asked
    assert cluster.drains == 1, "an ingress that is ready already is told"


def test_serve_is_ended_where_its_replicas_take_too_long(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fault(name: str) -> None:
        if name == "serve.delete":
            raise TimeoutError("not deleted after 60s")

    cluster.fault = fault
    run(monkeypatch, lambda ending: False)
    assert cluster.asked == ENDED


def test_ray_adds_replicas_where_requests_wait() -> None:
    scaling: Any = application._scale(ReplicaOptions(1, 4, 48))["autoscaling_config"]
    assert (scaling.min_replicas, scaling.max_replicas) == (1, 4)
    assert scaling.target_ongoing_requests == 48
    assert application._scale(ReplicaOptions(2, 2, 48)) == {"num_replicas": 2}


class _Ready(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()

    def log_message(self, *given: object) -> None:
        pass


def test_a_proxy_of_the_environment_is_not_asked_for_this_machine(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    monkeypatch.setattr(application.serve, "status", lambda: SimpleNamespace(applications={}))
    ending = _Ending()
    late = threading.Timer(SECONDS, ending.first.set)
    late.start()
    with http.server.HTTPServer(("127.0.0.1", 0), _Ready) as server:
        answering = threading.Thread(target=server.serve_forever)
        answering.start()
        try:
            url = f"http://127.0.0.1:{server.server_port}/ready"
            assert application._wait_until_ready(ending, url)
        finally:
            late.cancel()
            server.shutdown()
            answering.join()
