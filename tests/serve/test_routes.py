"""The routes around completions: tokens, metrics, state, keys."""

from __future__ import annotations

import json
import socket
import time
from http.client import HTTPResponse
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from starlette.routing import Route

import kvgraph
from kvgraph import Engine
from kvgraph.serve.app import make_app
from kvgraph.serve.options import ServeOptions
from tests.serve.running import Server, answered, frames, posted, refusal, serving

TEXT = "The import statement — naïvely"
HI = {"role": "user", "content": "Hi"}
CLOCK: Any = {"type": "function", "function": {"name": "clock"}}
ORIGIN = "https://a.example"
OPEN = ("/", "/health", "/ready")
"""Routes that ask for no key."""


def metrics(client: httpx.Client) -> dict[str, float]:
    """Name and labels but for the model's -> value."""
    answer = client.get("/metrics")
    assert answer.status_code == 200
    return {
        sample.name
        + "".join(sorted(set(sample.labels.values()) - {sample.labels["model_name"]})): (
            sample.value
        )
        for family in text_string_to_metric_families(answer.text)
        for sample in family.samples
    }


def test_tokens_of_a_text_and_back(server: Server, engine: Engine) -> None:
    found = answered(server.post("/tokenize", {"prompt": TEXT}))
    ids = engine.tokenize(TEXT)
    assert found == {"tokens": ids, "count": len(ids), "max_model_len": 2048}
    plain = answered(server.post("/tokenize", {"prompt": TEXT, "add_special_tokens": False}))
    assert plain["tokens"] == engine.tokenize(TEXT, special_tokens=False)
    for tokens, text in ((ids, "<s>" + TEXT), (plain["tokens"], TEXT), ([], "")):
        assert answered(server.post("/detokenize", {"tokens": tokens})) == {"prompt": text}


def test_tokens_as_they_read(server: Server) -> None:
    found = answered(server.post("/tokenize", {"prompt": TEXT, "return_token_strs": True}))
    assert len(found["token_strs"]) == found["count"]
    for token, text in zip(found["tokens"], found["token_strs"], strict=True):
        assert answered(server.post("/detokenize", {"tokens": [token]})) == {"prompt": text}
    for asks in (False, None):
        body = {"prompt": TEXT, "return_token_strs": asks}
        assert "token_strs" not in answered(server.post("/tokenize", body))


OFFERS = {
    "Connection": "Upgrade, HTTP2-Settings",
    "upgrade": "h2c",
    "HTTP2-Settings": "AAEAAEAAAAIAAAABAAMAAABkAAQBAAAAAAUAAEAA",
}
"""As Java's client sends them with every request in HTTP/1.1."""


@pytest.mark.parametrize("framing", ["Content-Length: {}\r\n\r\n{}", "chunked"])
def test_a_client_that_offers_http_2_is_answered_in_http_1(server: Server, framing: str) -> None:
    body = json.dumps({"prompt": TEXT}) + "\r\n"
    if framing == "chunked":
        rest = f"Transfer-Encoding: chunked\r\n\r\n{len(body):x}\r\n{body}\r\n0\r\n\r\n"
    else:
        rest = framing.format(len(body), body)
    offers = "".join(f"{name}: {value}\r\n" for name, value in OFFERS.items())
    head = f"POST /tokenize HTTP/1.1\r\nHost: kvgraph\r\n{offers}"
    url = server.client.base_url
    with socket.create_connection((url.host, url.port)) as to:
        to.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        begins = head.index("upgrade:")
        for cut in (0, begins - 2, begins - 1, begins, begins + 3, len(head) + rest.index("\n\r")):
            whole = head + rest  # the connection stays open
            to.sendall(whole[:cut].encode())
            time.sleep(0.02 if cut else 0)  # so that it comes in two pieces
            to.sendall(whole[cut:].encode())
            with HTTPResponse(to) as answer:
                answer.begin()
                assert json.load(answer) == answered(server.post("/tokenize", {"prompt": TEXT}))
    assert "pgrade" not in server.log()


@pytest.mark.parametrize("cut", [None, *range(1, 12)])
def test_a_body_is_left_as_it_is(server: Server, cut: int | None) -> None:
    """A chunk begins behind a line break; requests come one behind the other in a packet."""
    parts = ['{"prompt":"please ', 'upgrade: now"}\r\n\r\n\r\n']
    offers = "".join(f"{name}: {value}\r\n" for name, value in OFFERS.items())
    head = f"POST /tokenize HTTP/1.1\r\nHost: kvgraph\r\n{offers}"
    chunks = "".join(f"{len(part):x}\r\n{part}\r\n" for part in parts)
    body = "".join(parts)
    chunked = f"{head}Transfer-Encoding: chunked\r\n\r\n{chunks}0\r\n\r\n"
    whole = chunked + f"{head}Content-Length: {len(body)}\r\n\r\n{body}" + chunked
    expected = answered(server.post("/tokenize", {"prompt": "please upgrade: now"}))
    url = server.client.base_url
    with socket.create_connection((url.host, url.port)) as to:
        to.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        at = 0 if cut is None else len(chunked) - cut  # around the end of the chunks
        to.sendall(whole[:at].encode())
        time.sleep(0.02)
        to.sendall(whole[at:].encode())
        with to.makefile("rb") as answers:
            for _ in range(3):
                length = 0
                assert answers.readline().startswith(b"HTTP/1.1 200")
                while line := answers.readline().strip().lower():
                    if line.startswith(b"content-length:"):
                        length = int(line.split(b":")[1])
                assert json.loads(answers.read(length)) == expected
    assert "pgrade" not in server.log()


def test_a_stream_in_http_1_0_has_no_chunks(server: Server) -> None:
    """The end of the connection ends it."""
    body = {"prompt": "The", "max_tokens": 8, "stream": True, "temperature": 0}
    with server.connect() as to:
        to.sendall(posted("/v1/completions", body, "1.0"))
        with to.makefile("r", newline="\r\n") as answer:
            head = list(iter(answer.readline, "\r\n"))
            told = frames(iter(answer.read().splitlines()))
    assert "connection: close\r\n" in head
    assert not [line for line in head if line.startswith("transfer-encoding")]
    text = "".join([frame["choices"][0]["text"] for frame in told])
    assert text == server.complete("The")["choices"][0]["text"]


def test_a_whole_answer_in_http_1_0(server: Server) -> None:
    with server.connect() as to, HTTPResponse(to) as answer:
        to.sendall(posted("/tokenize", {"prompt": TEXT}, "1.0"))
        answer.begin()
        assert answer.will_close
        assert json.load(answer) == answered(server.post("/tokenize", {"prompt": TEXT}))


def test_a_packet_of_line_breaks_does_not_stop_the_server(server: Server) -> None:
    """The search for a header that may be cut took a minute for 65,000 of them."""
    url = server.client.base_url
    with socket.create_connection((url.host, url.port)) as to:
        to.sendall(b"\r" * 60_000 + b"x")
        assert server.client.get("/health", timeout=20).status_code == 200


def test_tokens_of_messages(server: Server, engine: Engine) -> None:
    messages = [HI]
    for asks in (True, False):
        body = {"messages": messages, "add_generation_prompt": asks}
        assert answered(server.post("/tokenize", {"prompt": "The", "add_generation_prompt": asks}))
        for adds in (None, False):
            assert answered(server.post("/tokenize", {**body, "add_special_tokens": adds}))[
                "tokens"
            ] == engine.apply_chat_template(messages, add_generation_prompt=asks)


def test_tokens_of_a_chat_with_tools(server: Server, engine: Engine) -> None:
    messages = [HI]
    more: Any = {"tools": [CLOCK], "chat_template_kwargs": {"date": "today"}}
    body = {"messages": messages, **more}
    found = answered(server.post("/tokenize", body | {"reasoning_effort": "low"}))
    assert found["tokens"] == engine.apply_chat_template(messages, **more)
    usage = answered(server.post("/v1/chat/completions", {**body, "max_tokens": 1}))["usage"]
    assert found["count"] == usage["prompt_tokens"]


@pytest.mark.parametrize(
    ("path", "body", "sentence"),
    [
        ("/tokenize", {}, "expected one of prompt and messages"),
        ("/tokenize", {"prompt": "a", "messages": []}, "expected one of prompt and messages"),
        ("/tokenize", {"messages": [{}]}, "messages[0].role: expected text"),
        ("/tokenize", {"text": "a"}, "unknown field `text`"),
        ("/tokenize", {"prompt": "a", "reasoning_effort": "low"}, "expected messages next to it"),
        ("/tokenize", {"prompt": "a", "tools": []}, "tools: expected messages next to it"),
        ("/tokenize", {"prompt": "a", "chat_template_kwargs": {}}, "expected messages next to it"),
        ("/tokenize", {"messages": [HI], "tools": [{}]}, "tools: expected"),
        (
            "/tokenize",
            {"messages": [HI], "add_special_tokens": True},
            "add_special_tokens: expected false, got True",
        ),
        ("/tokenize", {"messages": [HI], "tool_choice": "required"}, "tool_choice: expected"),
        ("/detokenize", {"tokens": [2048]}, "expected token ids in [0, 2048), got 2048"),
        ("/detokenize", {"tokens": [-1]}, "Expected `int` >= 0"),
        ("/detokenize", {"tokens": ["a"]}, "Expected `int`, got `str`"),
    ],
)
def test_tokens_that_are_none(server: Server, path: str, body: object, sentence: str) -> None:
    assert sentence in refusal(server.post(path, body), 400)


def test_who_serves(server: Server, artifact: Path) -> None:
    assert answered(server.client.get("/version")) == {"version": kvgraph.__version__}
    model = answered(server.client.get("/v1/models"))["data"][0]
    assert model["object"] == "model"
    assert model["max_model_len"] == 2048
    assert model["id"] == server.complete("The")["model"] == artifact.name
    assert answered(server.client.get(f"/v1/models/{artifact.name}")) == model
    other = refusal(server.client.get("/v1/models/a/b"), 404)
    assert other == f"model: expected {artifact.name!r}, got 'a/b'"
    for path in ("/health", "/ready"):
        assert answered(server.client.get(path)) == {}


def test_a_page_without_outside_resources(server: Server) -> None:
    page = server.client.get("/")
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert "default-src 'none'" in page.headers["content-security-policy"]
    assert "http://" not in page.text
    assert "https://" not in page.text


def test_the_state_tells_what_runs(server: Server) -> None:
    body = {"prompt": "The", "max_tokens": 2000, "ignore_eos": True, "stream": True, "n": 2}
    before = server.state()
    with server.client.stream("POST", "/v1/completions", json=body) as stream:
        lines = stream.iter_lines()
        while '"index":1' not in next(lines):  # the second of two equal prompts starts later
            pass
        state = server.state()
        assert state["num_running"] == len(state["rows"]) == 2
        held = state["num_pages"] - state["num_free_pages"]
        assert held >= max(row["pages"] for row in state["rows"]) > 0
        assert state["rows"][0]["tokens"] > state["rows"][0]["prompt_tokens"] == 2
    server.wait_until_idle()
    assert server.state()["generated_tokens"] > before["generated_tokens"]
    assert metrics(server.client)["kvgraph:num_requests_running"] == 0


def test_the_rate_of_prompts_is_measured(artifact: Path, tmp_path: Path) -> None:
    """Of one that runs alone, too."""
    with serving(tmp_path / "log", artifact, "--threads", 1) as server:
        assert server.state()["prefill_rate"] is None
        server.complete([5] * 64)
        rate = server.state()["prefill_rate"]
        assert rate > 0
        server.complete([6] * 64)
        assert server.state()["prefill_rate"] != rate


def test_metrics_count(server: Server) -> None:
    server.wait_until_idle()
    before = metrics(server.client)
    prompt = "Metrics count what is asked for, and what is answered; they count it once each."
    usage = [server.complete(prompt, max_tokens=5)["usage"] for _ in range(2)]
    refusal(server.post("/v1/completions", {"prompt": 5}), 400)
    after = metrics(server.client)
    change = {name: value - before.get(name, 0) for name, value in after.items()}
    prompts = 2 * usage[0]["prompt_tokens"]
    cached = usage[1]["prompt_tokens_details"]["cached_tokens"]
    assert cached > 0
    for name, value in {
        "prompt_tokens_total": prompts,
        "generation_tokens_total": 10,
        "request_success_totallength": 2,
        "prefix_cache_queries_total": prompts,
        "prefix_cache_hits_total": cached,
        "num_preemptions_total": 0,
        "time_to_first_token_seconds_count": 2,
        "e2e_request_latency_seconds_count": 2,
        "request_queue_time_seconds_count": 2,
        "request_prefill_time_seconds_count": 2,
        "request_decode_time_seconds_count": 2,
        "request_prompt_tokens_count": 2,
        "request_prompt_tokens_sum": prompts,
        "request_generation_tokens_sum": 10,
        "request_max_num_generation_tokens_sum": 10,
        "num_requests_running": 0,
        "num_requests_waiting": 0,
        "kv_cache_usage_perc": 0,
    }.items():
        assert change[f"kvgraph:{name}"] == value, name
    assert change["kvgraph:inter_token_latency_seconds_count"] <= 8  # several may come at once
    assert any("cache_config_info" in name for name in after)


def test_what_is_not_answered_is_not_counted(server: Server) -> None:
    """An echo alone computes a token that the client did not ask for."""
    server.wait_until_idle()
    before, logged = metrics(server.client), len(server.log())
    answer = server.complete("The import", max_tokens=0, echo=True, logprobs=1)
    assert answer["usage"]["completion_tokens"] == 0
    after = metrics(server.client)
    for name, count in (("generation_tokens_total", 0), ("request_success_totallength", 1)):
        assert after[f"kvgraph:{name}"] - before[f"kvgraph:{name}"] == count, name
    line = json.loads(server.log()[logged:].splitlines()[0])
    assert (line["generated_tokens"], line["reasons"]) == (0, ["length"])


def guarded() -> list[tuple[str, str]]:
    """Path and method of every route but those that are OPEN."""
    service: Any = SimpleNamespace(options=ServeOptions())
    routes = [route for route in make_app(service).routes if isinstance(route, Route)]
    found = [(one.path.replace("{name:path}", "any"), min(one.methods or ())) for one in routes]
    return [one for one in found if one[0] not in OPEN]


UNROUTED = [("/nope", "GET"), ("/v1/completions", "GET"), ("/v1/completions", "OPTIONS")]
"""Requests that no endpoint takes: unknown paths and wrong methods."""


def check_origins(server: Server) -> None:
    """A browser asks first, without a key; a page of another origin reads no answer."""
    for origin, code in ((ORIGIN, 200), ("https://b.example", 400)):
        asked = {
            "origin": origin,
            "access-control-request-method": "POST",
            "access-control-request-headers": "authorization, content-type",
        }
        first = server.client.options("/v1/chat/completions", headers=asked)
        assert first.status_code == code
        answer = server.client.get("/v1/models", headers={"origin": origin})
        assert answer.status_code == 401
        allowed = ORIGIN if code == 200 else None
        assert answer.headers.get("access-control-allow-origin") == allowed
        assert first.headers.get("access-control-allow-origin") == allowed


def test_keys_origins_and_dashboards(artifact: Path, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("key-one\n\nkey-two\n")
    options = ("--threads", 1, "--api-key-file", keys, "--metrics-prefix", "vllm:")
    with serving(tmp_path / "log", artifact, *options, "--allowed-origins", ORIGIN) as server:
        check_origins(server)
        for path in OPEN:
            assert server.client.get(path).status_code == 200
        for wrong in (
            {},
            {"authorization": "Bearer key-three"},
            {"authorization": "Basic key-one"},
        ):
            for path, method in (*guarded(), *UNROUTED):
                answer = server.client.request(method, path, content=b"no JSON", headers=wrong)
                assert "expected Bearer" in refusal(answer, 401), path
                assert answer.headers["www-authenticate"] == "Bearer"
        for key in ("key-one", "key-two"):
            server.client.headers["authorization"] = f"Bearer {key}"
            server.complete("The")
        assert metrics(server.client)["vllm:generation_tokens_total"] == 16
        assert "key-" not in server.log()
