"""Every decoder of transformers: what is right stays right; refusals are sentences of the list."""

from __future__ import annotations

import json

import pytest
import transformers

from kvgraph.compiler.frontends.refusals import Reason, unsupported
from tools.models import cases, page
from tools.models.__main__ import judged
from tools.models.judge import Verdict

GOLDEN = json.loads(page.GOLDEN.read_text())


@pytest.mark.slow
def test_results_are_those_of_the_page() -> None:
    """`python -m tools.models --write` after a change that is meant."""
    assert GOLDEN["transformers"] == transformers.__version__
    found = dict(judged(cases.names()))
    assert {name: page.result_of(verdict) for name, verdict in found.items()} == GOLDEN["cases"]


@pytest.mark.parametrize("name", ["llama", "gemma2", "qwen2_5_vl (whole)", "mpt", "jetmoe"])
def test_a_case(name: str) -> None:
    """One of each kind, with any transformers."""
    ((found, verdict),) = judged([name])
    assert found == name
    assert page.result_of(verdict) == GOLDEN["cases"][name]


def test_refusals_are_of_the_list() -> None:
    refused = [result for result in GOLDEN["cases"].values() if result.startswith("refused")]
    assert {result.removeprefix("refused: ") for result in refused} <= set(Reason.__members__)
    assert not [result for result in GOLDEN["cases"].values() if result == "other tokens"]


def test_a_reason_is_found_in_its_sentence() -> None:
    words = dict.fromkeys(
        ("found", "layers", "layer", "count", "names", "name", "size", "told", "mask", "kind"), 7
    )
    for reason in Reason:
        sentence = unsupported("odd", reason.said(**words, error="ValueError"))
        assert page.reason_of(sentence) is reason
    assert page.reason_of(unsupported("odd", "of another kind")) is None


def test_a_verdict_is_kept_by_its_reason() -> None:
    assert page.result_of(Verdict("right", "with a remark")) == "right"
    assert (
        page.result_of(Verdict("refused", "its attention is not causal")) == "refused: NOT_CAUSAL"
    )
