"""What Ray adds to a request: `python -m benchmarks.replicas [ARTIFACT] [--json]`.

Method: `kvgraph serve` alone, then with `--replicas 1` and `--replicas 2`, each engine with one
thread, over tiny-llama (or ARTIFACT); the client is another process of the same machine, as in
`benchmarks.serve`. Prompts of 64 random tokens, so that no prefix is shared. Medians.

  first    time to the first token of one request, and between two tokens of one stream
  streams  tokens/s of 32 streams of 64 tokens
  rss      resident memory of all processes that the command started, Ray's among them

With --prefill: prompts of --tokens tokens, the time to the first token

  computed   of one replica that computes it
  loaded     of another one, started later, that loads the same prompt's pages from the disk tier
  elsewhere  of a replica for which another one computes it (--prefill-replicas)

and the ratio of the last to the sum of the others. The disk tier is in memory where --folder is.

Reference: every answer's text is that of the server without Ray. The baseline is that server; the
limit of a request's cost is the hop through Serve's proxy, measured by GET /health.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import statistics
import subprocess
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

import kvgraph
from benchmarks.serve_client import Answer, ask, resident, run, server, together
from benchmarks.start import TINY_LLAMA

REPEATS, STREAMS, NEW = 40, 32, 64


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.replicas")
    parser.add_argument("artifact", type=Path, nargs="?")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--prefill", action="store_true")
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--folder", default="/dev/shm")
    wanted = parser.parse_args()
    if wanted.prefill:
        print(json.dumps(elsewhere(wanted.artifact, wanted.tokens, wanted.folder)))
        return
    with tempfile.TemporaryDirectory() as folder:
        artifact = wanted.artifact
        if artifact is None:
            artifact = Path(folder) / "tiny-llama.kvg"
            kvgraph.compile(TINY_LLAMA, artifact, page_size=16)
        rows: list[dict[str, Any]] = []
        texts: list[str] = []
        for name, flags in (
            ("one engine", ()),
            ("1 replica", ("--replicas", "1")),
            ("2 replicas", ("--replicas", "2")),
        ):
            with server(artifact, "--threads", "1", "--num-pages", "600", *flags) as (port, pid):
                row, found = measured(port, pid)
            assert found == (texts or found), f"{name}: another text than without Ray"
            texts = found
            rows.append({"server": name} | row)
    if wanted.json:
        print(json.dumps(rows))
        return
    names = list(rows[0])
    print("  ".join(name.rjust(14) for name in names))
    for row in rows:
        print("  ".join(f"{row[name]}".rjust(max(14, len(name))) for name in names))


def measured(port: int, pid: int) -> tuple[dict[str, Any], list[str]]:
    rng = random.Random(0)
    single = [run(ask(port, prompt(rng), 16)) for _ in range(REPEATS)]
    batches = [run(together(port, [prompt(rng) for _ in range(STREAMS)], NEW)) for _ in range(3)]
    firsts = [answer.news[0] - answer.sent for answer in single]
    gaps = [gap for answer in single for gap in answer.gaps]
    rates = [rate(answers) for answers in batches]
    row = {
        "health ms": ms(health(port) for _ in range(REPEATS)),
        "first ms": ms(firsts),
        "token ms": ms(gaps),
        "streams tok/s": round(statistics.median(rates)),
        "rss MiB": round(sum(map(resident, family(pid)))),
    }
    return row, [answer.text for answers in (single, *batches) for answer in answers]


def elsewhere(artifact: Path, tokens: int, folder: str) -> dict[str, Any]:
    """Milliseconds to the first token; the answers of all three are compared."""
    rng = random.Random(0)
    prompts = [prompt(rng, tokens) for _ in range(8)]
    one = ("--threads", "1", "--num-pages", "2000", "--replicas", "1")
    found: dict[str, Any] = {}
    texts: list[list[str]] = []
    with (
        tempfile.TemporaryDirectory(dir=folder) as kept,
        tempfile.TemporaryDirectory(dir=folder) as other,
    ):
        for name, flags in (
            ("computed", ("--disk", kept)),
            ("loaded", ("--disk", kept)),
            ("elsewhere", ("--disk", other, "--prefill-replicas", "1")),
        ):
            with server(artifact, *one, *flags) as (port, _):
                run(ask(port, prompt(rng, tokens), 4))
                answers = [run(ask(port, each, 4)) for each in prompts]
            found[f"{name} ms"] = ms([answer.news[0] - answer.sent for answer in answers])
            found[f"{name} cached"] = [
                answer.usage["prompt_tokens_details"]["cached_tokens"] for answer in answers
            ]
            texts.append([answer.text for answer in answers])
    assert texts[0] == texts[1] == texts[2], "texts differ"
    sum_of = found["computed ms"] + found["loaded ms"]
    return found | {"ratio": round(found["elsewhere ms"] / sum_of, 2)}


def prompt(rng: random.Random, tokens: int = 64) -> list[int]:
    return [rng.randrange(5, 2000) for _ in range(tokens)]


def rate(answers: list[Answer]) -> float:
    begun = min(answer.sent for answer in answers)
    ended = max(answer.news[-1] for answer in answers)
    return sum(answer.usage["completion_tokens"] for answer in answers) / (ended - begun)


def health(port: int) -> float:
    start = time.perf_counter()
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/health") as answer:
        answer.read()
    return time.perf_counter() - start


def ms(seconds: Any) -> float:
    return round(statistics.median(seconds) * 1e3, 2)


def family(pid: int) -> list[int]:
    """The process, and all that it started."""
    found = [pid]
    for parent in found:
        with contextlib.suppress(subprocess.CalledProcessError):
            children = subprocess.check_output(["pgrep", "-P", str(parent)], text=True)
            found += map(int, children.split())
    return found


if __name__ == "__main__":
    main()
