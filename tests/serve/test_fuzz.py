"""Bodies that hypothesis makes up: an answer or a sentence, never a failure of the server."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.serve.running import Server, refusal, serving

MESSAGES = [{"role": "user", "content": "Hi"}]
STREAM_OPTIONS = {"include_usage": True, "continuous_usage_stats": True}
VALID: dict[str, dict[str, Any]] = {
    "/v1/completions": {
        "prompt": "The", "model": "", "max_tokens": 2, "temperature": 0.5, "top_p": 0.9, "n": 1,
        "seed": 1, "stop": ["x"], "stream": False, "stream_options": STREAM_OPTIONS,
        "presence_penalty": 0.5, "frequency_penalty": 0.5, "logit_bias": {"5": 1}, "echo": True,
        "logprobs": 1, "best_of": 1, "suffix": "", "top_k": 5, "min_p": 0.1, "min_tokens": 1,
        "ignore_eos": True, "repetition_penalty": 1.1, "stop_token_ids": [5], "cache_salt": "a",
        "include_stop_str_in_output": True, "user": "me",
    },
    "/v1/chat/completions": {
        "messages": MESSAGES, "model": "", "max_tokens": 2, "max_completion_tokens": 2,
        "temperature": 0.5, "n": 1, "stream": False, "logprobs": True, "top_logprobs": 1,
        "response_format": {"type": "text"}, "tools": [], "tool_choice": "auto",
        "chat_template_kwargs": {}, "add_generation_prompt": True, "metadata": {},
        "continue_final_message": False, "stop_token_ids": [5],
        "seed": 1, "logit_bias": {"5": 1}, "stop": "x",
    },
    "/v1/responses": {
        "input": [{"role": "user", "content": [{"type": "input_text", "text": "Hi"}]}],
        "instructions": "x", "max_output_tokens": 2, "top_logprobs": 1, "include": [],
        "text": {"format": {"type": "text"}}, "reasoning": {"effort": "low"}, "tools": [],
        "tool_choice": "auto", "background": False, "truncation": "disabled", "store": True,
        "metadata": {}, "temperature": 0.5, "seed": 1, "stream": False,
    },
    "/tokenize": {"prompt": "The", "add_special_tokens": True, "return_token_strs": True},
    "/detokenize": {"tokens": [5, 6], "model": ""},
}  # fmt: skip

GUIDED = {
    "guided_json": True,
    "guided_regex": "a",
    "guided_choice": ["a"],
    "structured_outputs": {"choice": ["a"]},
}

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(-2, 2050)
    | st.floats()
    | st.text(max_size=20)
    | st.sampled_from(["role", "content", "type", "text", "user", "json_object", "\ud800"])
)
JSON = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=5)
        | st.dictionaries(st.sampled_from(["role", "content", "type", "text", "a"]), inner)
    ),
    max_leaves=10,
)


def replaced(path: str) -> st.SearchStrategy[bytes]:
    """A request that is valid but for one field, which may be another one's name."""
    fields = VALID[path] | GUIDED | {"unknown": 0}
    changes = [
        (like(value) | JSON).map(lambda value, name=name: {name: value})
        for name, value in fields.items()
    ]
    return st.one_of(changes).map(lambda change: dumped(VALID[path] | change))


def like(value: object) -> st.SearchStrategy[Any]:
    """Of the same type, in range or not."""
    if isinstance(value, bool):
        return st.booleans()
    if isinstance(value, int):
        return st.integers(-1, 40)
    if isinstance(value, float):
        return st.floats(-0.5, 2.5)
    return st.text(max_size=20) if isinstance(value, str) else st.just(value)


def dumped(body: object) -> bytes:
    return json.dumps(body, ensure_ascii=True).encode()


def bodies(path: str) -> st.SearchStrategy[bytes]:
    whole = dumped(VALID[path])
    cut = st.integers(0, len(whole)).map(lambda at: whole[:at])
    damaged = st.tuples(st.integers(0, len(whole)), st.binary(max_size=4)).map(
        lambda pair: whole[: pair[0]] + pair[1] + whole[pair[0] + len(pair[1]) :]
    )
    return replaced(path) | replaced(path) | JSON.map(dumped) | st.binary() | cut | damaged


REQUESTS = st.sampled_from(sorted(VALID)).flatmap(
    lambda path: st.tuples(st.just(path), bodies(path))
)


def post_many(server: Server, count: int) -> None:
    """Each is answered, or refused with a sentence; afterwards every page is back."""
    for path, body in VALID.items():
        assert server.post(path, body).status_code == 200

    @settings(
        max_examples=count,
        deadline=None,
        database=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )
    @given(REQUESTS)
    def post(request: tuple[str, bytes]) -> None:
        path, body = request
        check(server.client.post(path, content=body))

    post()
    server.wait_until_idle()
    assert "Traceback" not in server.log(), server.log()


def check(answer: httpx.Response) -> None:
    if answer.status_code == 200:
        assert "server_error" not in answer.text, answer.text
    else:
        assert answer.status_code < 500, answer.text
        refusal(answer, answer.status_code)


def test_bodies_that_are_made_up(server: Server) -> None:
    post_many(server, 300)


@pytest.mark.slow
def test_memory_stays_flat_under_20_000_of_them(
    tmp_path: Path, compiled: Callable[..., Path]
) -> None:
    with serving(tmp_path / "log", compiled("tiny-llama"), "--threads", 1) as server:
        post_many(server, 2_000)
        before = resident(server)
        post_many(server, 20_000)
        grown = resident(server) - before
        print(f"resident: {before >> 20} MiB after 2,000, {grown >> 10} KiB more after 20,000")
        assert grown < 16 << 20, f"{before} bytes after 2,000 bodies, {grown} more after 20,000"


def resident(server: Server) -> int:
    """Bytes of memory that the server's process has."""
    status = Path(f"/proc/{server.process.pid}/status").read_text()
    return int(status.partition("VmRSS:")[2].split()[0]) << 10
