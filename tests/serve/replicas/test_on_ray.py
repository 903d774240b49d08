"""`kvgraph serve --replicas` on a Ray of this machine."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

ray = pytest.importorskip("ray", reason="pip install 'kvgraph[ray]'")

from kvgraph import Engine, RequestError, SamplingParams  # noqa: E402
from tests.serve.running import Server, answered, refusal, serving, wait_for  # noqa: E402
from tests.support.artifacts import rehash  # noqa: E402
from tests.support.command_line import COMMAND  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Ray's own, of pydantic

APPLICATION = "kvgraph"
SECONDS_OF_A_KILL = 30
"""At most, with the start of another replica."""
PAGES = 3200
"""Of a replica: more than half of all conversations' pages."""


@contextmanager
def cluster() -> Iterator[None]:
    """A Ray that the server and this process share; its processes are gone afterwards."""
    kept = dict(os.environ)
    os.environ |= {"RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0"}
    os.environ["RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S"] = "60"  # as the command sets it
    os.environ.pop("RAY_ADDRESS", None)
    own: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
    try:
        context = ray.init(
            "local", num_cpus=4, include_dashboard=False, object_store_memory=2**28, **own
        )
        os.environ["RAY_ADDRESS"] = context.address_info["gcs_address"]
        yield
    finally:
        ray.shutdown()
        os.environ.clear()
        os.environ.update(kept)


@contextmanager
def replicas(artifact: Path, log: Path, count: int, *more: Any) -> Iterator[Server]:
    """A server whose environment has a proxy that does not answer."""
    flags = ("--replicas", count, "--threads", 1, "--num-pages", PAGES, "--port", 0, *more)
    command = ("env", "http_proxy=http://127.0.0.1:9", *COMMAND, "serve")
    with serving(log, artifact, *flags, command=command) as server:
        yield server


def index() -> Any:
    return ray.get_actor(APPLICATION, namespace=APPLICATION)


def processes() -> list[int]:
    """Of the replicas."""
    name = f"ray::ServeReplica:{APPLICATION}:(decode|prefill)"
    found = subprocess.run(["pgrep", "-f", name], capture_output=True, text=True, check=False)
    return list(map(int, found.stdout.split()))


def require_right_index(count: int) -> None:
    """The index holds the pages of each pool, and no others.

    Asked by a process of its own: Serve keeps a cluster that it knew.
    """
    command = [sys.executable, "-m", "tests.serve.replicas.pools", str(count)]
    found = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    pools = json.loads(found.stdout.splitlines()[-1])
    assert len(pools) == count
    for name, held in pools.items():
        wait_for(
            lambda name=name, held=held: sorted(ray.get(index().pages.remote(name))) == held,
            f"the index differs from the pool of {name}",
        )


class Conversations:
    """Prompts of token ids, each the one before it and `new` more tokens, in a random order."""

    def __init__(self, count: int, turns: int = 5, new: int = 64, seed: int = 0) -> None:
        drawn = random.Random(seed)
        self.texts = [[drawn.randrange(5, 2000) for _ in range(turns * new)] for _ in range(count)]
        lengths = [(i, new * (turn + 1)) for i in range(count) for turn in range(turns)]
        keys = {i: iter(sorted(drawn.random() for _ in range(turns))) for i in range(count)}
        self.order = sorted(lengths, key=lambda pair: next(keys[pair[0]]))

    def prompts(self) -> list[list[int]]:
        return [self.texts[i][:length] for i, length in self.order]


def hit_tokens(client: httpx.Client, prompts: list[list[int]]) -> int:
    found = 0
    for prompt in prompts:
        body = {"prompt": prompt, "max_tokens": 1, "temperature": 0, "ignore_eos": True}
        usage = answered(client.post("/v1/completions", json=body))["usage"]
        found += usage["prompt_tokens_details"]["cached_tokens"]
    return found


def test_a_server_of_two_replicas(artifact: Path, engine: Engine, tmp_path: Path) -> None:
    """The answers of one engine, and its refusals; SIGTERM ends all of it."""
    prompts = ["The import statement", "A for statement", "An expression"]
    greedy = SamplingParams(max_new_tokens=16)
    expected = [done.text for done in engine.generate(prompts, greedy)]
    with replicas(artifact, tmp_path / "log", 2) as server:
        for _ in range(2):
            for prompt, text in zip(prompts, expected, strict=True):
                done = server.complete(prompt, max_tokens=16)
                assert done["choices"][0]["text"] == text
        several = server.complete(prompts * 2, max_tokens=16)["choices"]  # calls at a time
        assert [choice["text"] for choice in several] == expected * 2
        chunks = server.events(
            "/v1/completions", {"prompt": prompts[0], "max_tokens": 16, "temperature": 0}
        )
        assert "".join([chunk["choices"][0]["text"] for chunk in chunks]) == expected[0]
        assert server.chat("What is a module?")["choices"][0]["message"]["content"]
        refused = server.post("/v1/completions", {"prompt": [5, 10**6], "max_tokens": 4})
        assert "expected token ids in [0, 2048)" in refusal(refused, 400)
        assert server.client.get("/ready").status_code == 200
        assert answered(server.client.get("/v1/models"))["data"][0]["max_model_len"] == 2048
        wait_for(lambda: server.state()["generated_tokens"] > 100, "no numbers of the replicas")
        wait_for(lambda: server.state()["num_pages"] == 2 * PAGES, "not the pages of both replicas")
        assert "num_requests_running" in server.client.get("/metrics").text
        wait_for(lambda: len(processes()) == 2, "not two replicas")
        long = {"prompt": [5, 6, 7], "max_tokens": 1500, "temperature": 0, "ignore_eos": True}
        with ThreadPoolExecutor(1) as thread:
            asked = thread.submit(server.post, "/v1/completions", long | {"n": 4})
            wait_for(lambda: server.state()["num_running"] == 4, "they do not run")
            os.kill(processes()[0], signal.SIGKILL)
            os.kill(processes()[0], signal.SIGKILL)
            texts = [choice["text"] for choice in answered(asked.result())["choices"]]
        assert len(texts) == 4
        assert len({*texts}) == 1
        for prompt, text in zip(prompts * 3, expected * 3, strict=True):
            done = server.complete(prompt, max_tokens=16)
            assert done["choices"][0]["text"] == text
        with ThreadPoolExecutor(1) as thread:
            stream = thread.submit(server.events, "/v1/completions", long)
            wait_for(lambda: server.state()["num_running"] == 1, "the stream does not run")
            server.terminate()
            while (ready := server.client.get("/ready")).status_code == 200:
                time.sleep(0.02)
            refusal(ready, 503)
            assert stream.result()[-1]["choices"][0]["finish_reason"] == "length", "it was drained"
            assert server.process.wait(60) == 0
    assert processes() == []
    logged = [line for line in server.log().splitlines() if line.startswith("{")]  # not Ray's own
    lines = list(map(json.loads, logged))
    done = [line["path"] for line in lines if "reasons" in line and line["status"] == 200]
    assert done.count("/v1/completions") == 6 + 1 + 1 + 1 + 9 + 1, "a line of the log for each"
    assert done.count("/v1/chat/completions") == 1


@pytest.mark.slow
@pytest.mark.parametrize(("count", "least"), [(2, 1.35), (4, 2.2)])
def test_prompts_go_where_their_pages_are(
    artifact: Path, tmp_path: Path, count: int, least: float
) -> None:
    """As many tokens from caches as one engine has with all pools, and more than by chance."""
    prompts = Conversations(200).prompts()
    one = Engine(artifact, num_threads=1, num_pages=PAGES * count)
    once = SamplingParams(max_new_tokens=1, ignore_eos=True)
    best = sum([one.generate([prompt], once)[0].cached_tokens for prompt in prompts])
    with cluster(), replicas(artifact, tmp_path / "log", count) as server:
        wait_for(lambda: ray.get(index().load.remote())[0] == count, "a replica is missing")
        routed = hit_tokens(server.client, prompts)
        require_right_index(count)
        ray.kill(index(), no_restart=False)  # it starts again, and is told all
        require_right_index(count)
        ray.kill(index(), no_restart=True)  # from here on chance decides
        by_chance = 2 * hit_tokens(server.client, Conversations(100, seed=1).prompts())
    print(f"{count} replicas: {routed} of {best}, by chance {by_chance}")
    assert routed >= 0.98 * best
    assert routed >= least * by_chance


@pytest.mark.slow
@pytest.mark.parametrize(("prefill", "kills"), [(0, 6), (1, 50)])
def test_replicas_that_are_killed(artifact: Path, tmp_path: Path, prefill: int, kills: int) -> None:
    """Every request is answered once with the tokens of one engine, streamed ones too.

    Replicas that compute prompts for others are killed as well. All prompts are asked again until
    there were so many kills.
    """
    prompts = Conversations(60, new=64 if prefill == 0 else 320).prompts()
    more: tuple[Any, ...] = ("--max-queued-tokens", 8 * 1600)  # what all threads ask at once
    if prefill:
        more += ("--prefill-replicas", 1, "--disk", tmp_path / "pages")
    few = SamplingParams(max_new_tokens=24, ignore_eos=True)
    engine = Engine(artifact, num_threads=1, num_pages=PAGES)
    expected = [done.text for done in engine.generate(prompts, few)]
    numbers = range(len(prompts))
    ended = threading.Event()
    killed = 0

    def kill() -> None:
        nonlocal killed
        drawn, latest = random.Random(1), time.monotonic() + kills * SECONDS_OF_A_KILL
        while killed < kills and time.monotonic() < latest:
            if ended.wait(drawn.uniform(0.2, 1.5)):
                return
            if len(found := processes()) == 2 + prefill:
                os.kill(drawn.choice(found), signal.SIGKILL)
                killed += 1

    with cluster(), replicas(artifact, tmp_path / "log", 2, *more) as server:

        def ask(number: int) -> str:
            body = {"prompt": prompts[number], "max_tokens": 24, "temperature": 0}
            body |= {"ignore_eos": True}
            if number % 2:
                chunks = server.events("/v1/completions", body)
                return "".join([chunk["choices"][0]["text"] for chunk in chunks])
            done = answered(server.post("/v1/completions", body))
            text: str = done["choices"][0]["text"]
            return text

        killer = threading.Thread(target=kill)
        killer.start()
        try:
            with ThreadPoolExecutor(8) as threads:
                while killer.is_alive():
                    assert list(threads.map(ask, numbers)) == expected
        finally:
            ended.set()
            killer.join()
        assert killed == kills, "replicas were not started again"
        wait_for(lambda: len(processes()) == 2 + prefill, "a replica was not started again")
        require_right_index(2)
    assert processes() == []


def refused(*arguments: Any, **environment: str) -> str:
    command = [*COMMAND, "serve", *map(str, arguments)]
    given = {"env": os.environ | environment, "capture_output": True, "text": True}
    done = subprocess.run(command, check=False, timeout=300, **given)  # type: ignore[call-overload]
    assert done.returncode == 2, done.stderr
    (line,) = [one for one in done.stderr.splitlines() if one.startswith("kvgraph: ")]
    return line


def test_bad_flags(artifact: Path) -> None:
    assert "--max-replicas: expected --replicas" in refused(artifact, "--max-replicas", 3)
    events = ("--kv-events", "tcp://127.0.0.1:*")
    assert "--kv-events: expected one engine" in refused(artifact, "--replicas", 2, *events)
    assert "--prefill-replicas: expected --replicas" in refused(artifact, "--prefill-replicas", 1)
    both = ("--replicas", 1, "--prefill-replicas", 1)
    assert "expected --disk or --remote" in refused(artifact, *both)
    line = refused(artifact, "--replicas", 3, "--max-replicas", 2)
    assert "--max-replicas: expected at least --replicas=3, got 2" in line


def test_settings_that_no_request_can_have(artifact: Path, tmp_path: Path) -> None:
    own = tmp_path / "own.kvg"
    shutil.copytree(artifact, own)
    (own / "generation_config.json").write_text('{"repetition_penalty": 0}')
    rehash(own)
    line = refused(own, "--replicas", 1)
    assert f"{own}/generation_config.json: repetition_penalty: expected in" in line


def test_an_address_of_no_cluster(artifact: Path) -> None:
    line = refused(artifact, "--replicas", 2, RAY_ADDRESS="nowhere")
    assert "RAY_ADDRESS=nowhere: expected a Ray cluster" in line


def test_a_proxy_that_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvgraph.serve.replicas import application

    def late(**options: Any) -> None:
        raise ray.exceptions.GetTimeoutError("Get timed out\nin a call")

    monkeypatch.setattr(application.serve, "start", late)
    with pytest.raises(RequestError, match=r"Ray Serve to start within 60 s, got GetTimeoutError"):
        application._start_serve("127.0.0.1", 0, 75)


@pytest.mark.parametrize(
    ("address", "sentence"),
    [
        ("", "ray: expected its processes to start on this machine, got The node timed out"),
        ("here:1", "RAY_ADDRESS=here:1: expected a Ray cluster, got The node timed out"),
    ],
)
def test_a_ray_that_does_not_start(
    monkeypatch: pytest.MonkeyPatch, address: str, sentence: str
) -> None:
    from kvgraph.serve.replicas import application

    def late(**options: Any) -> None:
        raise Exception("The node timed out\nand more")  # as Ray's `Node` does

    monkeypatch.setattr(application.os, "environ", {"RAY_ADDRESS": address})
    monkeypatch.setattr(application.ray, "init", late)
    with pytest.raises(RequestError, match=f"{sentence}$"):
        application._connect()


@pytest.mark.slow
def test_a_second_command_is_refused_and_the_first_goes_on(artifact: Path, tmp_path: Path) -> None:
    with cluster(), replicas(artifact, tmp_path / "log", 1) as server:
        text = server.complete("A for statement")["choices"][0]["text"]
        line = refused(artifact, "--replicas", 1, "--port", 0)
        assert "Ray Serve runs nothing, got another `kvgraph serve --replicas`" in line
        assert server.complete("A for statement")["choices"][0]["text"] == text
        assert ray.get(index().load.remote())[0] == 1


def test_without_ray(artifact: Path, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import sys\nsys.modules['ray'] = None\n")
    line = refused(artifact, "--replicas", 2, PYTHONPATH=str(tmp_path))
    assert line.endswith("pip install 'kvgraph[ray]'")


def test_a_port_in_use_and_a_replica_with_another_model(
    artifact: Path, compiled: Callable[..., Path], tmp_path: Path
) -> None:
    with cluster():
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
            line = refused(artifact, "--replicas", 2, "--port", port)
            assert f"127.0.0.1:{port}: expected an address to listen at" in line
        mine = tmp_path / "model.kvg"
        shutil.copytree(artifact, mine)
        shutil.copytree(compiled("llama"), tmp_path / "other")
        # The command has read its artifact before a replica does.
        process = subprocess.Popen(
            [sys.executable, "-m", "kvgraph", "serve", mine, "--replicas", "1", "--port", "0"],
            stderr=subprocess.PIPE,
            text=True,
        )
        assert process.stderr is not None
        assert "listening" in process.stderr.readline()
        mine.rename(tmp_path / "old")
        (tmp_path / "other").rename(mine)
        _, errors = process.communicate(timeout=300)
        assert process.returncode == 2, errors
        assert "expected the model that this command was given" in errors
    assert processes() == []
