"""The figures of the bench: its protocol, counts, rates and limits."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from kvgraph.bench import limits, machine, table
from kvgraph.bench.counts import Counts, count
from kvgraph.bench.engines import CaseResult, EngineResult
from kvgraph.bench.figures import make_figures
from kvgraph.bench.limits import Gemm, Limits, read_limits
from kvgraph.bench.protocol import Case, Settings, make_prompts, plan_cases
from kvgraph.contract.manifest import read_manifest
from kvgraph.runtime.machine import memory
from tests.support.artifacts import Compiled
from tests.support.packed import pack

GOLDEN = [[1, 15730, 25756, 16263, 21924], [1, 11913, 4192, 7321, 25561]]


# -- protocol


def test_cases() -> None:
    """Equal lengths in a batch; contexts at the largest batch, the prompt's own left out."""
    settings = Settings(threads=1, prompt=64, batches=(1, 8, 1), contexts=(32, 64, 128), requests=5)
    cases = plan_cases(settings, 4096)
    assert [case.name for case in cases] == [
        "batch 1 x 64",
        "batch 8 x 64",
        "batch 8 x 32",
        "batch 8 x 128",
        "5 ragged",
    ]
    assert cases[3].lengths == (128,) * 8
    assert cases[3].tokens == 8 * (128 + 128)
    ragged = cases[-1].lengths
    assert len(set(ragged)) > 1
    assert all(32 <= length <= 96 for length in ragged)
    assert plan_cases(settings, 4096) == cases


@pytest.mark.parametrize(
    ("rows", "prompt", "step_tokens", "lead"),
    [
        (8, 512, 4096, 1),
        (1, 512, 64, 1),
        (8, 1024, 768, 10),
        (2, 4, 2, 5),
        (6, 4, 2, 9),  # a step has room for a token of each row
    ],
)
def test_rows_have_more_tokens_until_all_of_them_decode(
    rows: int, prompt: int, step_tokens: int, lead: int
) -> None:
    settings = Settings(threads=1, prompt=prompt, batches=(rows,), contexts=(), new_tokens=9)
    case, ragged = plan_cases(settings, step_tokens)
    assert (case.lead, case.new_tokens) == (lead, lead + 8)
    assert (ragged.lead, ragged.new_tokens) == (1, 9)


def test_prompts_that_are_computed_once() -> None:
    """Prefix caching leaves decode alone to measure: no prefill figure, no ragged case."""
    settings = Settings(threads=1, prompt=64, batches=(2,), contexts=(32,), prefix_caching=True)
    cases = plan_cases(settings, 64)
    assert [case.name for case in cases] == ["batch 2 x 64", "batch 2 x 32"]
    assert [case.lead for case in cases] == [1, 1]
    t = CaseResult([1.0], [1.0], [3.0])
    engine = EngineResult("a", True, "bf16", cases={case.name: t for case in cases})
    figures = make_figures(cases, [engine], {}, [])
    assert [figure.what for figure in figures] == ["decode", "decode"]
    assert figures[0].tokens_per_s == 2 * 127 / 2.0


def test_prompts_are_the_same_on_every_machine() -> None:
    case = Case("batch 2 x 5", "batch", (5, 5), 4, 1)
    rows = make_prompts(case, 32000, 1, 7)
    assert rows == GOLDEN
    assert make_prompts(case, 32000, None, 7)[0][1:] == rows[0][1:]
    assert make_prompts(case, 32000, 1, 8) != rows


# -- counts


def test_counts_of_tiny_llama(compiled: Compiled) -> None:
    """By hand, from config.json: the head is tied to the embedding, and read whole."""
    folder = compiled("tiny-llama")
    counts = count(folder, read_manifest(folder))
    hidden, inner, heads, layers = 128, 352, 8 * 16, 4
    layer = hidden * (2 * heads + 2 * 4 * 16) + 3 * hidden * inner
    assert (counts.precision, counts.matrices) == ("fp32", layers * layer)
    assert counts.head == 2048 * hidden
    assert 0 <= counts.weight_bytes - 4 * (counts.matrices + counts.head) < 4 * 2 * hidden * 10
    assert counts.kv_bytes == {0: 2 * 4 * 4 * 16 * 4}


def test_counts_leave_lookup_tables_out(compiled: Compiled, tmp_path: Path) -> None:
    folder = compiled("tiny-llama")
    matrix = np.zeros((128, 64), ml_dtypes.bfloat16)
    tensors = {
        "model.embed_tokens.weight": np.zeros((2048, 128), np.float32),
        "model.lm_head.weight": np.zeros((128, 2048), np.float16),
        "kvgraph.cos_sin_0": np.zeros((2048, 16), np.float32),
        "norm.weight": np.zeros(128, np.float32),
    } | {f"q{i}": matrix.copy() for i in range(80)}
    save_file(tensors, tmp_path / "weights.safetensors")
    counts = count(tmp_path, replace(read_manifest(folder), weights="bfloat16"))
    assert (counts.matrices, counts.head) == (80 * 128 * 64, 128 * 2048)
    assert counts.weight_bytes == 80 * matrix.nbytes + 2 * 128 * 2048 + 4 * 128
    assert counts.precision == "bf16"


@pytest.mark.parametrize("name", ["model.embed_tokens", "model.lm_head"])
@pytest.mark.parametrize(("weights", "bits"), [("bf16", 16), ("int8", 8), ("int4", 4)])
def test_counts_of_packed_weights(
    compiled: Compiled, tmp_path: Path, name: str, weights: str, bits: int
) -> None:
    """A tied embedding is there twice: a table of rows, and the head that is read whole."""
    folder = compiled("tiny-llama")
    tensors = {f"{name}.weight": np.zeros((2048, 128), ml_dtypes.bfloat16)}
    for stem, width in (("model.q", 512), (name, 2048)):
        packed = pack([np.ones((width, 128), np.float32)], bits)
        fields = {"packed": packed.weight, "scales": packed.scales}
        fields |= {"group_bytes": packed.group_bytes}
        tensors |= {f"{stem}.{key}": a for key, a in fields.items() if a is not None}
    save_file(tensors, tmp_path / "weights.safetensors")
    counts = count(tmp_path, replace(read_manifest(folder), weights=weights))
    assert (counts.precision, counts.matrices, counts.head) == (weights, 512 * 128, 2048 * 128)
    table = tensors[f"{name}.weight"].nbytes
    assert counts.weight_bytes == sum(array.nbytes for array in tensors.values()) - table


def test_windows_bound_what_a_step_reads() -> None:
    counts = Counts("fp32", 0, 1000, 10, 5, {0: 2.0, 16: 3.0})
    assert counts.decode_bytes(2, 10) == 1000 + 2 * (2 * 10 + 3 * 10)
    assert counts.decode_bytes(2, 100) == 1000 + 2 * (2 * 100 + 3 * 16)
    assert counts.prefill_flops(2, 7) == 2 * 10 * 2 * 7 + 2 * 5 * 2


# -- figures


def test_figures() -> None:
    """Tokens over seconds, as protocol.py says; the limits are the better of those around."""
    case = Case("c", "batch", (10, 10), 5, 3)
    ragged = Case("r", "ragged", (4, 6), 5, 3)
    one = [1.0, 2.0, 4.0]
    t = CaseResult(one, one, [3.0, 3.0, 8.0])
    ours = EngineResult("a", True, "bf16", cases={"c": t, "r": CaseResult([], [], [1.0, 2.0, 5.0])})
    slow, fast, other = (
        EngineResult(name, False, kind, cases={"c": CaseResult([by], [by], [2 * by])})
        for name, kind, by in (("s", "bf16", 4.0), ("f", "bf16", 1.0), ("o", "int8", 0.5))
    )
    readings = [
        Limits(each * 1e-9, 1, [Gemm("bfloat16", "torch", each * 1e-9)])
        for each in (100, 200, 900, 900, 900)
    ]
    counts = {"a": Counts("bf16", 0, 60, 4, 3, {0: 1.0})}
    prefill, decode, *_ = (
        figure
        for figure in make_figures([case, ragged], [ours, slow, fast, other], counts, readings)
        if figure.ours
    )
    assert (prefill.what, prefill.tokens_per_s, prefill.best_tokens_per_s) == ("prefill", 10, 20)
    flops = 2 * 4 * 2 * 10 + 2 * 3 * 2
    assert prefill.share == pytest.approx(flops / 2.0 / 200)
    assert prefill.limit == "bfloat16 GEMM"
    assert (prefill.ratio, prefill.ratio_any) == (10 / 20, 10 / 40)
    assert decode.tokens_per_s == 2 * 4 / 2.0  # the median of 2, 1 and 4 seconds
    assert decode.repeats_tokens_per_s == [4, 8, 2]
    nbytes = (60 + 2 * (10 + 2.5)) * 4
    assert decode.limit == "read"
    assert decode.share == pytest.approx(nbytes / 2.0 / 200)
    (last,) = make_figures([ragged], [ours], counts, readings)
    assert (last.what, last.tokens_per_s, last.share) == ("ragged", 2 * 5 / 2.0, None)


def test_decode_is_timed_where_all_rows_decode() -> None:
    """From t(L) on, and the bytes of a step are those of rows so far on."""
    case = Case("c", "batch", (10, 10), 8, 1, lead=4)
    result = EngineResult("a", True, "bf16", cases={"c": CaseResult([1.0], [3.0], [5.0])})
    counts = {"a": Counts("bf16", 0, 60, 4, 3, {0: 1.0})}
    _, decode = make_figures([case], [result], counts, [Limits(1.0, 1, [])] * 2)
    assert decode.tokens_per_s == 2 * 4 / 2.0
    assert decode.share == pytest.approx((60 + 2 * (10 + 5.5)) * 4 / 2.0 / 1e9)


def test_a_limit_that_was_not_read_gives_no_share() -> None:
    case = Case("c", "batch", (10,), 5, 1)
    result = EngineResult("a", True, "bf16", cases={"c": CaseResult([1.0], [1.0], [1.0])})
    readings = [Limits(1.0, 1, [Gemm("float32", "numpy", 1.0)], "no torch")] * 2
    counts = {"a": Counts("bf16", 0, 60, 4, 3, {0: 1.0})}
    prefill, decode = make_figures([case], [result], counts, readings)
    assert (prefill.share, prefill.limit) == (None, None)
    assert decode.tokens_per_s is None  # t(N) was not above t(1)
    assert decode.share is None


def test_one_repeat_of_noise_leaves_no_figure() -> None:
    """Else a median between a repeat below zero and one above it is any number at all."""
    case = Case("c", "batch", (10,), 5, 2)
    result = EngineResult(
        "a", False, "bf16", cases={"c": CaseResult([1.0, 1.1], [1.0, 1.1], [2.1, 0.2])}
    )
    _, decode = make_figures([case], [result], {}, [Limits(1.0, 1, [])] * 2)
    assert decode.tokens_per_s is None
    assert decode.repeats_tokens_per_s[1] is None
    assert decode.best_tokens_per_s == pytest.approx(4 / 1.1)


def test_engines_that_agree_in_no_first_token_are_named() -> None:
    """With the first of their class; rounding differs in some case, another model in all."""
    rows = {"a": [5, 6], "same": [5, 6], "rounded": [5, 7], "other": [8, 7], "int8": [9, 9]}
    results = [
        EngineResult(
            name,
            name == "a",
            "int8" if name == "int8" else "fp32",
            cases={f"c{i}": CaseResult(first_ids=[each, 1]) for i, each in enumerate(ids)},
        )
        for name, ids in rows.items()
    ]
    results.append(EngineResult("failed", False, "fp32"))
    assert table._doubts(results) == [
        "other has another first token than a in every case: they may not run one model."
    ]


# -- limits


def test_limits_of_this_machine() -> None:
    reading = read_limits(1, 1 << 22)
    assert reading.read_gbs > 0
    assert reading.read_bytes == 1 << 22
    assert {(g.dtype, g.library) for g in reading.gemms} == {
        ("float32", "numpy"),
        ("float32", "torch"),
        ("bfloat16", "torch"),
        ("int8", "torch"),
    }
    assert reading.gflops("float32") == max(g.gflops for g in reading.gemms if "32" in g.dtype)
    assert reading.gflops("int4") is None


def test_limits_without_torch_say_so() -> None:
    code = (
        "import sys; sys.modules['torch'] = None; sys.argv = ['limits', '1', '4096']; "
        "from kvgraph.bench import limits; limits.GEMM_SIZE = 16; limits.main()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    reading = json.loads(done.stdout)
    need = "torch: needed for the limits of bfloat16 and int8, not installed"
    assert reading["missing"] == f"{need}; pip install 'kvgraph[torch]'"
    assert [gemm["library"] for gemm in reading["gemms"]] == ["numpy"]


@pytest.mark.parametrize(("gflops", "size"), [(100.0, limits.GEMM_SIZE), (1.5, limits.SMALL_SIZE)])
def test_a_slow_product_is_read_of_a_small_size(
    gflops: float, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def product(size: int) -> Callable[[], object]:
        asked.append(size)
        return lambda: size

    monkeypatch.setattr(limits, "best_seconds", lambda call: 2 * int(call()) ** 3 / (gflops * 1e9))
    assert limits._gemm("bfloat16", "torch", product).gflops == pytest.approx(gflops)
    assert asked[-1] == size


@pytest.mark.parametrize(("stalled", "expected"), [(0, 0.5e-3), (6, 0.5e-3), (99, 33e-3)])
def test_a_stall_of_the_first_calls_does_not_decide(stalled: int, expected: float) -> None:
    """It lasts longer than the least number of calls."""
    now, calls = 0.0, 0

    def call() -> None:
        nonlocal now, calls
        calls += 1
        now += 33e-3 if calls <= stalled else 0.5e-3

    assert limits.best_seconds(call, lambda: now) == pytest.approx(expected)


def test_long_calls_are_read_a_few_times() -> None:
    now = 0.0

    def call() -> None:
        nonlocal now
        now += 1.0

    assert limits.best_seconds(call, lambda: now) == 1.0
    assert now == 1 + limits.READS


def test_each_part_of_the_buffer_is_first_written_by_a_thread_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where a machine has several memories, pages lie near the thread that writes them first."""
    waited: list[int] = []

    class Watched(threading.Barrier):
        def wait(self, timeout: float | None = None) -> int:
            waited.append(threading.get_ident())
            return super().wait(timeout)

    monkeypatch.setattr(threading, "Barrier", Watched)
    with ThreadPoolExecutor(3) as workers:
        assert limits.reader(1 << 12, 3, workers)() == [1, 1, 1]
    assert len(set(waited)) == 3
    assert threading.get_ident() not in waited


def test_caches_of_all_processors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two chiplets of two processors: each has 32 MiB that its own two share."""
    for number in range(4):
        sharing = "0-1" if number < 2 else "2-3"
        for index, size, shared in ((0, "32K", number), (2, "1M", number), (3, "32M", sharing)):
            folder = tmp_path / f"cpu{number}" / "cache" / f"index{index}"
            folder.mkdir(parents=True)
            (folder / "size").write_text(f"{size}\n")
            (folder / "shared_cpu_list").write_text(f"{shared}\n")
    for usable, expected in (([0, 1, 2, 3], 64), ([1], 32), ([7], 0)):
        monkeypatch.setattr(machine, "processors", lambda: usable)  # noqa: B023
        assert machine.last_level_cache(tmp_path) == expected << 20


def test_threads_by_default_are_a_sessions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "default_threads", lambda: 1)
    assert machine.check_threads(None) == 1


def test_the_buffer_leaves_every_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "last_level_cache", lambda: 1 << 20)
    assert limits.buffer_bytes() == 1 << 30
    monkeypatch.setattr(limits, "memory", lambda: 64 << 30)
    monkeypatch.setattr(limits, "last_level_cache", lambda: 768 << 20)
    assert limits.buffer_bytes() == 3 << 30
    monkeypatch.setattr(limits, "memory", lambda: 8 << 30)
    assert limits.buffer_bytes() == 2 << 30


def test_memory_is_the_containers(tmp_path: Path) -> None:
    whole, own = memory(tmp_path, tmp_path / "none"), tmp_path / "own"
    for group, name in (
        ("0::/", "memory.max"),
        ("0::/a/b", "a/memory.max"),
        ("3:memory:/a\n0::/", "memory/a/memory.limit_in_bytes"),
    ):
        own.write_text(f"{group}\n")
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        for said, expected in (("max", whole), (str(1 << 60), whole), (str(1 << 20), 1 << 20)):
            path.write_text(f"{said}\n")
            assert memory(tmp_path, own) == expected
        path.unlink()
