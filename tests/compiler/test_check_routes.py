"""A check takes the other expert where a router's scores are nearly equal, and nowhere else."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from kvgraph.compiler.check import compare, routes
from kvgraph.compiler.check.compare import Logits, Tokens

TOKENS, EXPERTS, CHOSEN = 40, 8, 2
ROUTED = compare.tolerance(["float16"], routed=True)
TRACED: Any = None


def scores_of(*close: int) -> torch.Tensor:
    """Scores of two layers, `[2, T, E]`, far apart but for the first layer's of tokens `close`."""
    found = torch.randn(2, TOKENS, EXPERTS, generator=torch.Generator().manual_seed(0))
    ordered = found.sort(descending=True).indices
    for rank in range(EXPERTS):
        found.scatter_(-1, ordered[..., rank : rank + 1], 2.0 - rank)
    for token in close:
        last, following = ordered[0, token, CHOSEN - 1 : CHOSEN + 1]
        found[0, token, last] = found[0, token, following] + 1e-3
    return found


def with_other_choice(scores: torch.Tensor, *tokens: int) -> torch.Tensor:
    """Scores whose second and third best of the first layer are exchanged for these tokens."""
    found = scores.clone()
    for token in tokens:
        last, following = scores[0, token].sort(descending=True).indices[CHOSEN - 1 : CHOSEN + 1]
        found[0, token, [last, following]] = scores[0, token, [following, last]]
    return found


def logits_of(scores: torch.Tensor) -> Logits:
    """Logits of a row whose tokens see all tokens before them, through two layers of experts."""
    random = torch.Generator().manual_seed(1)
    hidden = torch.randn(TOKENS, 16, generator=random)
    experts = torch.randn(2, EXPERTS, 16, generator=random)
    for each, own in zip(scores, experts, strict=True):
        _, chosen = torch.topk(each, CHOSEN, dim=-1, sorted=False)
        hidden = hidden + own[chosen].sum(1)
        hidden = hidden + hidden.cumsum(0) / torch.arange(1, TOKENS + 1)[:, None]
    found: Logits = hidden.numpy()
    return found


def compared(
    monkeypatch: pytest.MonkeyPatch, scores: torch.Tensor, found: Logits
) -> tuple[bool, bool]:
    """Whether `found` is near the reference of these scores, as it is and with routes changed."""

    def reference(traced: object, rows: Sequence[Tokens]) -> list[Logits]:
        return [logits_of(scores) for _ in rows]

    monkeypatch.setattr(routes, "reference_logits", reference)
    row = np.zeros(TOKENS, np.int32)
    expected, has_routers = routes.rerouted(TRACED, [row], [found], ROUTED)
    assert has_routers
    before = compare.difference([found], [logits_of(scores)], ROUTED).fits
    return before, compare.difference([found], expected, ROUTED).fits


@pytest.mark.parametrize("changed", [[3], [3, 4, 20]])
def test_another_expert_of_nearly_equal_ones(
    changed: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    scores = scores_of(3, 4, 20, 21)
    found = logits_of(with_other_choice(scores, *changed))
    assert compared(monkeypatch, scores, found) == (False, True)


def test_another_expert_that_is_worse(monkeypatch: pytest.MonkeyPatch) -> None:
    scores = scores_of(4)
    found = logits_of(with_other_choice(scores, 3))
    assert compared(monkeypatch, scores, found) == (False, False)


def test_a_router_that_often_chooses_another_expert(monkeypatch: pytest.MonkeyPatch) -> None:
    scores = scores_of(*range(TOKENS))
    found = logits_of(with_other_choice(scores, *range(TOKENS)))
    assert compared(monkeypatch, scores, found) == (False, False)


def test_another_fault_at_a_token_of_nearly_equal_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    scores = scores_of(3)
    found = logits_of(with_other_choice(scores, 3))
    found[5:] += 1.5 * found[4]
    assert compared(monkeypatch, scores, found) == (False, False)


@pytest.mark.parametrize(("model", "is_said"), [("qwen3_moe", True), ("llama", False)])
def test_a_refusal_names_routers(
    model: str,
    is_said: bool,
    tmp_path: Path,
    model_folder: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import kvgraph.build

    right = kvgraph.build.run_artifact

    def wrong(folder: Path, rows: Any, chunk: Any) -> list[Logits]:
        return [np.roll(logits, 1, axis=0) for logits in right(folder, rows, chunk)]

    monkeypatch.setattr(kvgraph.build, "run_artifact", wrong)
    with pytest.raises(kvgraph.CheckError) as refused:
        kvgraph.compile(model_folder(model), tmp_path / "out", weights="bf16", page_size=16)
    assert (f"; {routes.ROUNDED_ROUTES}; nothing was written" in str(refused.value)) == is_said
