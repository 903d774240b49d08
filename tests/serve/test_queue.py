"""Requests that wait for a row, for pages or for their prompt, and those that are too many."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx

from tests.serve.running import (
    LONG,
    SECONDS,
    TEXTS,
    WAITING,
    paced,
    refusal,
    serving,
    stream_of,
    wait_for,
)


def test_a_full_queue_refuses_before_any_header(artifact: Path, tmp_path: Path) -> None:
    arguments = ("--max-batch-size", 1, "--max-queued-requests", 1, "--threads", 1)
    with paced(tmp_path, artifact, *arguments) as (server, pace):
        pace.allow(1)
        with stream_of(server, {**WAITING, "n": 2}):  # one of them waits
            for stream in (True, False):
                answer = server.post("/v1/completions", {"prompt": "The", "stream": stream})
                assert "expected at most 1 requests" in refusal(answer, 429)
                assert 1 <= int(answer.headers["retry-after"]) <= 60
            messages = [{"role": "user", "content": "Hi"}]
            refusal(server.post("/v1/chat/completions", {"messages": messages}), 429)
        pace.end()
        server.wait_until_idle()
        server.complete("The")


def test_prompts_that_wait_are_bounded(artifact: Path, tmp_path: Path) -> None:
    arguments = ("--max-batch-size", 1, "--max-queued-tokens", 100, "--threads", 1)
    with paced(tmp_path, artifact, *arguments) as (server, pace):
        pace.allow(1)
        with ThreadPoolExecutor() as pool, stream_of(server):
            waiting = pool.submit(server.complete, [5] * 500)  # alone in the queue it may wait
            wait_for(lambda: server.state()["num_queued"] == 1, "it does not wait")
            answer = server.post("/v1/completions", {"prompt": [5] * 2})
            assert "100 tokens of prompts waiting, got" in refusal(answer, 429)
            pace.end()
        assert waiting.result()["usage"]["prompt_tokens"] == 500


def test_requests_that_wait_for_pages_are_bounded(artifact: Path, tmp_path: Path) -> None:
    """Six prompts find their pages, and one waits; rows are enough for all."""
    arguments = ("--num-pages", 12, "--max-queued-requests", 1, "--threads", 1)
    with (
        paced(tmp_path, artifact, *arguments) as (server, pace),
        ThreadPoolExecutor(20) as pool,
    ):
        pace.allow(0)
        bodies = [{**LONG, "prompt": [5 + i] * 20, "max_tokens": 60} for i in range(20)]
        coming = [
            pool.submit(httpx.post, server.url + TEXTS, json=body, timeout=SECONDS)
            for body in bodies
        ]
        wait_for(lambda: sum([one.done() for one in coming]) == 13, "some are not refused")
        for one in coming:
            if one.done():
                assert "expected at most 1 requests" in refusal(one.result(), 429)
                assert 1 <= int(one.result().headers["retry-after"]) <= 60
        assert server.state()["num_queued"] == 7
        pace.end()
        assert sorted(one.result().status_code for one in coming) == [200] * 7 + [429] * 13
        server.wait_until_idle()
        server.complete("The")


def test_a_pool_that_is_too_small_for_all_serves_all(artifact: Path, tmp_path: Path) -> None:
    """Requests wait and are preempted; every answer is the one that it gets alone."""
    with serving(tmp_path / "log", artifact, "--num-pages", 12, "--threads", 1) as server:
        prompts = [[5 + i] * 20 for i in range(8)]
        fields = {"max_tokens": 60, "ignore_eos": True}
        alone = [server.complete(prompt, **fields)["choices"][0]["text"] for prompt in prompts]
        together = server.complete(prompts, **fields)["choices"]
        assert [choice["text"] for choice in together] == alone
        server.wait_until_idle()
