"""What a plan says of steps and their reserve."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvgraph import ParamsError
from tests.support.plans import LLAMA_8B, plan


@pytest.fixture
def llama_8b(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    return tmp_path


def test_memory_below_weights_and_step_or_below_one_page(llama_8b: Path) -> None:
    weights, step = 16_127_631_360, 2048 * (2 * 4096 + 4 * 14336) * 2 + 256 * 128256 * 4
    with pytest.raises(ParamsError) as raised:
        plan(llama_8b, memory=1)
    assert str(raised.value) == (
        f"memory: expected more than {weights} bytes of weights and {step} of a step of 2048 "
        "tokens, got 1"
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
