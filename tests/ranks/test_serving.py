"""A server of several ranks of which one ends: the server ends too, and says which."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.ranks import ended, started

COMMAND = ("--port", 0, "--num-pages", 64)


@pytest.fixture(scope="module")
def two(compiled: Callable[..., Path]) -> Path:
    return compiled("tiny-llama", tp=2)


@pytest.mark.parametrize("hosts", [False, True])
@pytest.mark.parametrize("is_idle", [True, False])
def test_a_server_ends_with_its_rank(is_idle: bool, hosts: bool, two: Path) -> None:
    """Within seconds where nothing runs; a stream ends with an error."""
    with started("serve", two, *COMMAND, hosts=hosts) as (leader, follower):
        assert leader.stderr is not None
        url = json.loads(leader.stderr.readline())["url"]
        while json.loads(leader.stderr.readline())["event"] != "ready":
            pass
        if is_idle:
            follower.kill()
        else:
            body = {"prompt": "The", "max_tokens": 1000, "ignore_eos": True, "stream": True}
            asked = urllib.request.Request(
                f"{url}/v1/completions",
                json.dumps(body).encode(),
                {"Content-Type": "application/json"},
            )
            with urllib.request.urlopen(asked, timeout=180) as answer:
                assert answer.readline().startswith(b"data: ")
                follower.kill()
                assert b"rank 1: expected it to take part" in answer.read()
        code, _, said = ended(leader)
    assert code == 2
    assert said.splitlines()[-1].startswith("kvgraph: rank 1: expected it to take part")
    assert "Traceback" not in said
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(f"{url}/ready", timeout=180)
