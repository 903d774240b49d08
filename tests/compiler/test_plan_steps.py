"""What a plan says of steps and their reserve."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from kvgraph import ParamsError, UnsupportedError
from kvgraph.compiler.reserve import EXPERTS_BYTES
from tests.support.plans import LLAMA_8B, plan


@pytest.fixture
def llama_8b(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    return tmp_path


def test_memory_below_weights_and_step_or_below_one_page(llama_8b: Path) -> None:
    weights, step = 16_127_631_360, 2048 * (2 * 4096 + 4 * 14336) * 2 + (256 + 128) * 128256 * 4
    with pytest.raises(ParamsError) as raised:
        plan(llama_8b, memory=1)
    assert str(raised.value) == (
        f"memory: expected more than {weights} bytes of weights and {step} of a step of 2048 "
        "tokens and 384 rows of logits, got 1"
    )
    with pytest.raises(ParamsError, match=r"at least one page of 16777216 bytes, got 9 bytes"):
        plan(llama_8b, memory=weights + step + 10)


def test_steps_of_fewer_tokens_leave_more_to_the_cache(llama_8b: Path) -> None:
    short = plan(llama_8b, max_batch_tokens=512)
    assert short.reserve.nbytes < plan(llama_8b).reserve.nbytes
    assert short.pages[""] > plan(llama_8b).pages[""]
    for name in ("max_batch_size", "max_batch_tokens"):
        with pytest.raises(ParamsError, match=f"{name}: expected >= 1, got 0"):
            plan(llama_8b, **{name: 0})


def test_a_step_has_no_more_rows_of_logits_than_tokens(llama_8b: Path) -> None:
    """Of requests, and of as many scored tokens as an engine takes."""
    assert plan(llama_8b, max_batch_tokens=16).reserve.rows == 16
    assert plan(llama_8b, max_batch_size=8).reserve.rows == 8 + 128
    assert plan(llama_8b, max_batch_size=10**12).reserve.rows == 2048


def test_a_lone_request_is_no_longer_than_was_asked_for(llama_8b: Path) -> None:
    made = plan(llama_8b, max_seq_len=100, max_batch_size=1)
    assert (made.longest_context, made.concurrent_requests) == (100, 1)


TINY = Path(__file__).parents[2] / "examples" / "tiny-llama"


def refused(folder: Path, **settings: object) -> str:
    with pytest.raises(ParamsError) as raised:
        plan(folder, target="cpu", max_seq_len=None, **settings)
    return str(raised.value)


def test_hints_of_fewer_tokens_and_of_fewer_rows() -> None:
    tokens, rows = "--max-batch-tokens 1024", "--max-batch-size 64"
    hints = refused(TINY, memory=19 << 20).partition("what fits: ")[2].split(", ")
    assert [hint for hint in hints if hint.startswith("--max")] == [tokens, rows]
    assert refused(TINY, memory=5 << 20, max_batch_size=10**12).endswith("--max-batch-tokens 32")
    plan(TINY, target="cpu", max_seq_len=None, memory=5 << 20, max_batch_tokens=32)


def test_a_refusal_says_what_no_shorter_step_saves(model_folder: Callable[[str], Path]) -> None:
    folder = model_folder("gpt_oss")
    said = refused(folder, memory=EXPERTS_BYTES, max_batch_tokens=16)
    assert "of a step of 16 tokens and 16 rows of logits (64.0 MiB of it for experts, of" in said


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (
            {"target": "cpu:avx2"},
            "target: expected 'cpu' without an instruction set, got 'cpu:avx2'",
        ),
        (
            {"page_size": 1 << 17},
            "page_size: expected 1 to 65536 tokens, got 131072",
        ),
        ({"tp": 0}, "tp: expected 1 to 64 ranks, got 0"),
    ],
)
def test_what_a_compile_refuses_of_a_request(
    settings: dict[str, object], sentence: str, llama_8b: Path
) -> None:
    with pytest.raises(UnsupportedError) as raised:
        plan(llama_8b, **settings)
    assert str(raised.value) == sentence
