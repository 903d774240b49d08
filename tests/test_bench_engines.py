"""The engines of the bench: processes that fail, artifacts, and other engines' adapters."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from kvgraph.bench import ours
from kvgraph.bench.engines import WORKER, CaseResult, EngineResult, EngineSpec, run_engine
from kvgraph.bench.peers import PEERS, adapter
from kvgraph.bench.plan import make_plan
from kvgraph.bench.protocol import Case, Settings, make_prompts
from kvgraph.runtime.artifact import Artifact
from tests.support.artifacts import Compiled

# -- processes


ABOUT = "{'settings': os.environ['OMP_NUM_THREADS'], 'pool_dtype': 'float32'}"


def outcome(tmp_path: Path, source: str, timeout: float = 60, lead: int = 1) -> EngineResult:
    """A run of two cases through an adapter of this `source`."""
    path = tmp_path / "adapter.py"
    path.write_text(source)
    spec = EngineSpec(
        name="x",
        ours=False,
        precision="fp32",
        adapter=path,
        python=sys.executable,
        model=tmp_path,
        prepares="def prepare" in source,
    )
    case = {"prompts": [[1, 2]] * 2, "lead": lead, "new_tokens": 3, "repeats": 2}
    cases = [case | {"name": n, "kind": kind} for n, kind in (("b", "batch"), ("r", "ragged"))]
    job = {"threads": 1, "first_prompt": [1], "cases": cases, "folder": str(tmp_path)}
    return run_engine(spec, job, timeout=timeout)


def adapter_source(body: str) -> str:
    return f"import os, signal, time\ndef load(job):\n    {body}\n"


GOOD = f"return (lambda prompts, n: [[5] * n for _ in prompts]), {ABOUT}"


def test_what_an_engine_prints_is_no_event(tmp_path: Path) -> None:
    noise = "print('hello', flush=True); os.system('echo from a child'); "
    result = outcome(tmp_path, adapter_source(noise + GOOD))
    assert result.error is None
    assert result.cases["b"].first_ids == [5, 5, 5]
    assert len(result.cases["b"].t1_s) == len(result.cases["b"].tn_s) == 2
    assert result.cases["r"].t1_s == []
    assert len(result.starts_s) == 2
    assert result.settings == "1"  # the job's threads, for libraries that read them at the start


@pytest.mark.parametrize(("lead", "measured"), [(1, [1, 3]), (2, [1, 2, 3])])
def test_what_is_measured(tmp_path: Path, lead: int, measured: list[int]) -> None:
    """One token, the lead where it is more, and all, in each repeat; of ragged requests all."""
    seen = f"open({str(tmp_path / 'asked')!r}, 'a').write(str(n))"
    generate = f"lambda prompts, n: [{seen}] and [[5] * n for _ in prompts]"
    result = outcome(tmp_path, adapter_source(f"return ({generate}), {ABOUT}"), lead=lead)
    assert result.error is None
    asked = [int(each) for each in (tmp_path / "asked").read_text()]
    starts, warm_up = [1, 1], [2]
    assert asked == [*starts, *warm_up, *measured, *measured, *warm_up, 3, 3]
    case = result.cases["b"]
    assert (case.tl_s == case.t1_s) == (lead == 1)
    assert len(case.tl_s) == 2
    assert result.cases["r"].tl_s == []


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("raise ValueError('no\\n such model')", "no such model"),
        ("os.kill(os.getpid(), signal.SIGKILL)", "the process ended with signal SIGKILL"),
        ("os.write(2, b'bad luck'); os._exit(3)", "the process ended with exit status 3: bad luck"),
        (
            f"return (lambda prompts, n: [[5]] * len(prompts)), {ABOUT}",
            "new tokens: expected 3 of each of 2 rows, got [1, 1]",
        ),
        ("import no_such_package", "No module named 'no_such_package'"),
    ],
)
def test_why_an_engine_failed(tmp_path: Path, body: str, reason: str) -> None:
    result = outcome(tmp_path, adapter_source(body))
    assert result.error == reason or (result.error or "").startswith(f"{reason}: ")


def test_an_engine_that_hangs_is_ended(tmp_path: Path) -> None:
    """With what it started: a child would keep the pipe open."""
    result = outcome(tmp_path, adapter_source("os.system('sleep 600')"), timeout=0.5)
    assert result.error == "expected to end within 0.5 s, did not"


def test_a_model_that_is_half_prepared_is_removed(tmp_path: Path) -> None:
    """However its process ended: by force here, which leaves it no time to do so."""
    code = "import os, sys, time; os.makedirs(sys.argv[1] + '/half'); time.sleep(600)"
    (tmp_path / "config.json").write_text("{}")
    source = (
        "import sys\nfrom pathlib import Path\n"
        "def prepare(job):\n"
        f"    return Path(job['folder'], 'x'), 'tool', [sys.executable, '-c', {code!r}]\n"
    )
    result = outcome(tmp_path, source, timeout=2)
    assert result.error == "expected to end within 2 s, did not"
    left = {path.name for path in tmp_path.iterdir()}
    assert left - {"__pycache__"} == {"adapter.py", "config.json"}


def test_a_case_that_an_engine_cannot_do(tmp_path: Path) -> None:
    source = (
        "import os\n"
        "calls = []\n"
        "def generate(prompts, n):\n"
        "    calls.append(n)\n"
        "    if len(calls) > 6: raise NotImplementedError('rows of one length only')\n"
        "    return [[5] * n for _ in prompts]\n"
        f"def load(job): return generate, {ABOUT}\n"
    )
    result = outcome(tmp_path, source)
    assert result.error is None
    assert result.cases["b"].error is None
    assert result.cases["r"] == replace(
        CaseResult(error="rows of one length only"), rss_bytes=result.cases["r"].rss_bytes
    )


def test_a_model_that_cannot_be_prepared(tmp_path: Path) -> None:
    result = outcome(tmp_path, "def prepare(job): raise OSError('disk full')\n")
    assert result.error == "disk full"
    assert result.starts_s == []


# -- artifacts


OURS_IN_A_PROCESS = """
import json, sys
from kvgraph.bench import ours
generate, about = ours.load(json.loads(sys.argv[1]))
assert [len(ids) for ids in generate([[1, 2, 3]] * 2, 2)] == [2, 2]
print(json.dumps([about["settings"], sorted(sys.modules)]))
"""


@pytest.mark.parametrize(("asked", "taken"), [(4096, 768), (24, 24), (1, 2)])
def test_the_process_of_an_artifact(compiled: Compiled, asked: int, taken: int) -> None:
    """It takes its session's steps where they are shorter, and imports what serving needs."""
    job = {"model": str(compiled("tiny-llama")), "rows": [8, 8], "threads": 1, "step_tokens": asked}
    job["prefix_caching"] = False
    command = [sys.executable, "-c", OURS_IN_A_PROCESS, json.dumps(job)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    settings, modules = json.loads(done.stdout)
    assert settings == f"onnx backend, float32 activations, steps of at most {taken} tokens"
    assert {"onnxruntime", "tokenizers"} <= set(modules)
    unneeded = {"torch", "onnx", "transformers", "typer", "rich", "importlib.metadata"}
    assert not unneeded & set(modules)


def test_ranks_share_the_threads(
    compiled: Compiled, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And shares of the limits are left out: each rank reads a part of the weights."""
    job = {"rows": [8], "step_tokens": 64, "prefix_caching": False}
    asked: list[int | None] = []
    whole = Artifact.session

    def session(artifact: Any, num_threads: int | None = None) -> Any:
        asked.append(num_threads)
        return whole(artifact, num_threads=1)

    monkeypatch.setattr(Artifact, "session", session)
    one, two = compiled("tiny-llama"), compiled("tiny-llama", tp=2)
    for folder, threads in ((two, 6), (two, 1), (one, 6)):
        ours.load(job | {"model": str(folder), "threads": threads})
    assert asked == [3, 1, 6]
    plan = make_plan([one, two], Settings(threads=1), work=tmp_path)
    assert [spec.name for spec in plan.engines] == [str(one), str(two)]
    assert plan.counts.keys() == {str(one)}


def test_prompts_kept_from_run_to_run_are_not_computed_again(
    compiled: Compiled, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But for each one's last page, whatever the runs before have left in the pool."""
    page, rows, new = 16, 4, 10
    case = Case("kept", "batch", (10 * page,) * rows, new, repeats=1)
    job = {
        "model": str(compiled("tiny-llama", page_size=page)),
        "rows": [10 * page + new] * rows,
        "threads": 1,
        "step_tokens": 4096,
        "prefix_caching": True,
        "new_tokens": new,
    }
    steps: list[int] = []

    class Watched(ours.Engine):
        def _run(self, batch: Any) -> Any:
            steps.append(len(batch.inputs.tokens))
            return super()._run(batch)

    monkeypatch.setattr(ours, "Engine", Watched)
    generate, _ = ours.load(job)
    prompts = make_prompts(case, 2000, None, seed=1)
    runs = []
    for new_tokens in (2, 1, new, 1, new):
        steps.clear()
        generate(prompts, new_tokens)
        runs.append(sum(steps))
    prompt, decode = rows * page, rows * (new - 1)
    assert runs == [rows * (10 * page + 1), prompt, prompt + decode, prompt, prompt + decode]


def test_decode_is_measured_in_steps_of_all_rows(
    compiled: Compiled, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What t(N) has and t(L) has not, where prompts take many steps."""
    settings = Settings(
        threads=1, prompt=100, new_tokens=6, batches=(4,), contexts=(), requests=0, step_tokens=24
    )
    plan = make_plan([compiled("tiny-llama")], settings, work=tmp_path)
    (case,) = plan.job["cases"]
    steps: list[int] = []

    class Watched(ours.Engine):
        def _run(self, batch: Any) -> Any:
            decode = len(batch.inputs.tokens) == len(batch.rows) == 4
            steps.append(decode)
            return super()._run(batch)

    monkeypatch.setattr(ours, "Engine", Watched)
    generate, _ = ours.load(plan.job | {"model": str(plan.engines[0].model)})
    counts = []
    for new_tokens in (case["lead"], case["new_tokens"]):
        steps.clear()
        generate(case["prompts"], new_tokens)
        counts.append((len(steps), sum(steps)))
    assert case["lead"] > 1
    (steps_l, decode_l), (steps_n, decode_n) = counts
    assert steps_n - steps_l == decode_n - decode_l == 6 - 1


# -- peers


@pytest.mark.parametrize("name", PEERS)
def test_adapters(name: str) -> None:
    """They import no engine by themselves, and say what they need and what they can."""
    module = adapter(name)
    assert callable(module.load)
    assert set(module.PRECISIONS) <= {"fp32", "bf16", "int8", "int4"}
    assert module.NEEDS


@pytest.mark.parametrize("file", [WORKER, *WORKER.with_name("peers").glob("[a-z]*.py")])
def test_an_engines_interpreter_needs_no_package(file: Path) -> None:
    command = [sys.executable, "-I", "-S", "-c", f"import runpy; runpy.run_path({str(file)!r})"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr


def test_llama_cpp_fills_its_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against a module that answers each token with its successor's row, and checks the order."""
    fake = FakeLlama()
    monkeypatch.setitem(sys.modules, "llama_cpp", fake)
    module = adapter("llama.cpp")
    (tmp_path / "llama.cpp-q4_0.gguf").write_bytes(b"GGUF")
    job = {"folder": str(tmp_path), "precision": "int4", "rows": [8, 8], "threads": 2}
    job["step_tokens"] = 4
    module.prepare(job)
    generate, about = module.load(job)
    assert generate([[3, 4, 5], [9, 1, 2, 7, 8]], 3) == [[6, 7, 8], [9, 10, 11]]
    assert fake.seen == {0: [3, 4, 5, 6, 7], 1: [9, 1, 2, 7, 8, 9, 10]}
    assert about["model_bytes"] == 4
    assert fake.params.n_batch == fake.params.n_ubatch == fake.most == 4
    assert fake.params.n_threads == fake.params.n_threads_batch == 2
    with pytest.raises(FileNotFoundError, match=r"q8_0.gguf: expected a GGUF file made by"):
        module.prepare(job | {"precision": "int8"})


class FakeLlama:
    """The part of llama_cpp that the adapter calls; the likeliest token is the last one plus 1."""

    __version__ = "0"

    def __init__(self) -> None:
        self.params = SimpleNamespace()
        self.most = 0
        self.seen: dict[int, list[int]] = {}
        self.logits: dict[int, Any] = {}
        for name in ("llama_backend_init", "llama_model_default_params", "llama_batch_free"):
            setattr(self, name, lambda *_: None)
        for name in ("model_load_from_file", "get_memory", "model_get_vocab", "init_from_model"):
            setattr(self, f"llama_{name}", lambda *_: self)

    def llama_vocab_n_tokens(self, _: Any) -> int:
        return 32

    def llama_context_default_params(self) -> Any:
        return self.params

    def llama_memory_clear(self, _: Any, data: bool) -> None:
        assert not data  # it would write the whole cache, while the clock runs
        self.seen.clear()

    def llama_batch_init(self, size: int, embeddings: int, rows: int) -> Any:
        assert (embeddings, rows) == (0, 1)
        fields = {name: [0] * size for name in ("token", "pos", "n_seq_id", "logits")}
        return SimpleNamespace(**fields, seq_id=[[0] for _ in range(size)], n_tokens=0)

    def llama_decode(self, _: Any, batch: Any) -> int:
        self.most = max(self.most, batch.n_tokens)
        for slot in range(batch.n_tokens):
            row = self.seen.setdefault(batch.seq_id[slot][0], [])
            assert batch.pos[slot] == len(row)
            assert batch.n_seq_id[slot] == 1
            row.append(batch.token[slot])
            logits = np.zeros(32, np.float32)
            logits[batch.token[slot] + 1] = 1
            self.logits[slot] = logits if batch.logits[slot] else None
        return 0

    def llama_get_logits_ith(self, _: Any, slot: int) -> Any:
        return np.ctypeslib.as_ctypes(self.logits[slot])
