"""Worker that measures one engine, run as a script by the engine's interpreter.

    python worker.py JOB.json

Standard library only, Python 3.9 or newer: a peer's interpreter has no kvgraph. An adapter (a file
of peers/) has `load(job)`, which returns `generate(prompts, new_tokens) -> new ids of each row` and
a dictionary about the engine. It may have `environment(job)`, and `prepare(job)`, which returns
None or a folder to make, the name of the tool that makes it, and the tool's command without its
last argument, the folder.

Events are JSON lines on stdout; all output of the engine goes to stderr.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any, Callable  # noqa: UP035  (Python 3.9)

if TYPE_CHECKING:  # a peer's interpreter has no kvgraph
    from kvgraph.contract.plain import JsonObject

Generate = Callable[[list[list[int]], int], list[list[int]]]
Say = Callable[..., None]

WARM_UP_TOKENS = 2

SOURCE = "kvgraph-bench-source"
"""File, in a folder that a peer's tool made, with the digest of the converted checkpoint."""

WEIGHTS = (".safetensors", ".bin", ".pt", ".pth")
"""Suffixes of the names of a checkpoint's weights."""


def main() -> None:
    lines = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def say(event: str, **fields: Any) -> None:
        lines.write(json.dumps({"event": event, **fields}) + "\n")
        lines.flush()

    with open(sys.argv[1], encoding="utf-8") as file:
        job = json.load(file)
    # Files next to this one would hide packages with the same names.
    here = os.path.dirname(os.path.abspath(__file__))
    sys.path[:] = [path for path in sys.path if os.path.abspath(path) != here]
    try:
        adapter = read_adapter(job["adapter"])
        phase = {"prepare": prepare, "measure": measure}[job["phase"]]
        phase(job, adapter, say)
    except Exception as error:  # any error of an engine becomes one line of the table
        traceback.print_exc()
        say("error", message=one_line(error))
        sys.exit(1)
    say("done", peak_rss_bytes=peak_rss())


def read_adapter(path: str) -> Any:
    spec = importlib.util.spec_from_file_location("kvgraph_bench_adapter", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def prepare(job: JsonObject, adapter: Any, say: Say) -> None:
    """Convert the model to the engine's own format, if it has one and this is not done yet."""
    start = time.perf_counter()
    wanted = adapter.prepare(job) if hasattr(adapter, "prepare") else None
    if wanted is not None:
        make_folder(*wanted, partial=Path(job["partial"]), source=source(Path(job["model"])))
    say("prepared", seconds=time.perf_counter() - start)


def make_folder(folder: Path, tool: str, command: list[str], *, partial: Path, source: str) -> None:
    """Run `command` to make a folder, atomically, if it does not exist.

    `partial`: a temporary folder, which the parent process removes. `source`: digest of the
    checkpoint; ValueError for an existing folder that was made from another one.
    """
    if folder.exists():
        require_source(folder, source)
        return
    made = partial / folder.name
    done = subprocess.run([*command, str(made)], capture_output=True, text=True)
    sys.stderr.write(done.stdout + done.stderr)
    if done.returncode:
        last = (done.stderr.strip() or "no message").splitlines()[-1]
        raise RuntimeError(f"{tool}: exit status {done.returncode}: {last}")
    (made / SOURCE).write_text(source, encoding="utf-8")
    os.rename(made, folder)


def require_source(folder: Path, source: str) -> None:
    """Raise ValueError unless the folder was made from the checkpoint with this digest."""
    path = folder / SOURCE
    if not path.is_file():
        got = f"one without a file {SOURCE}"
    elif path.read_text(encoding="utf-8") != source:
        got = "one of another model or of other weights"
    else:
        return
    raise ValueError(
        f"{folder}: expected a conversion of the checkpoint of --model, got {got}; remove it to "
        "convert again, or give another --peer-models"
    )


def source(model: Path) -> str:
    """Digest of a checkpoint: its config.json, and names, sizes and times of its weights."""
    digest = hashlib.sha256((model / "config.json").read_bytes())
    for path in sorted(model.iterdir()):
        if path.suffix in WEIGHTS:
            about = path.stat()
            digest.update(f"{path.name} {about.st_size} {about.st_mtime_ns}\n".encode())
    return digest.hexdigest()


def measure(job: JsonObject, adapter: Any, say: Say) -> None:
    """Measure the first token of a short prompt, then every case."""
    generate, about = adapter.load(job)
    check(generate([job["first_prompt"]], 1), 1, 1)
    # All processes share the monotonic clock, so the parent can subtract the start time.
    say("first_token", at=time.monotonic(), rss_bytes=peak_rss(), about=about)
    for case in job["cases"]:
        try:
            fields = time_case(generate, case, say)
        except NotImplementedError as error:
            fields = {"error": one_line(error)}
        say("case", name=case["name"], rss_bytes=peak_rss(), **fields)


def time_case(generate: Generate, case: JsonObject, say: Say) -> JsonObject:
    """Measure a case: seconds of each repeat, t(1) and t(L) (not for ragged requests) and t(N), and
    the first row's first ids."""
    prompts, lead, count = case["prompts"], case["lead"], case["new_tokens"]
    say("started", name=case["name"])
    generate(prompts, WARM_UP_TOKENS)
    one: list[float] = []
    leads: list[float] = []
    all_of_them: list[float] = []
    ids: list[list[int]] = []
    for _ in range(case["repeats"]):
        if case["kind"] != "ragged":
            one.append(timed(generate, prompts, 1)[0])
            leads.append(timed(generate, prompts, lead)[0] if lead > 1 else one[-1])
        seconds, ids = timed(generate, prompts, count)
        all_of_them.append(seconds)
    return {"t1_s": one, "tl_s": leads, "tn_s": all_of_them, "first_ids": ids[0][:8]}


def timed(
    generate: Generate, prompts: list[list[int]], count: int
) -> tuple[float, list[list[int]]]:
    start = time.perf_counter()
    ids = generate(prompts, count)
    seconds = time.perf_counter() - start
    check(ids, len(prompts), count)
    return seconds, [[int(token) for token in row] for row in ids]


def check(ids: list[list[int]], rows: int, count: int) -> None:
    found = [len(row) for row in ids]
    if found != [count] * rows:
        raise ValueError(f"new tokens: expected {count} of each of {rows} rows, got {found}")


def peak_rss() -> int | None:
    """Peak of resident bytes of this process only; None if the system does not say.

    The peak of getrusage cannot be used: it includes the peak of the parent process.
    """
    try:
        with open("/proc/self/status", encoding="ascii") as file:
            for line in file:
                if line.startswith("VmHWM:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass
    return None


def one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return (text or type(error).__name__)[:400]


if __name__ == "__main__":
    main()
