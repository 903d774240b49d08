"""Every decoder of transformers: what is right stays right; refusals are sentences of the list."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import transformers

import kvgraph
from kvgraph.compiler.refusals import Reason, unsupported
from tools.models import __main__ as command
from tools.models import cases, page
from tools.models.judge import Verdict, judge
from tools.models.processes import judged

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


def test_the_command() -> None:
    """Its processes find the function that it gives them."""
    done = subprocess.run(
        [sys.executable, "-m", "tools.models", "mpt"], capture_output=True, text=True
    )
    assert (done.returncode, done.stdout.split()[:2]) == (0, ["mpt", "refused"]), done.stderr


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


def test_a_refused_check_means_other_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise kvgraph.CheckError("logits differ")

    monkeypatch.setattr(kvgraph, "compile", refuse)
    assert judge("llama") == Verdict("other tokens", "CheckError: logits differ")


def test_a_library_that_is_missing_is_no_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise kvgraph.MissingDependencyError("onnx is not installed")

    monkeypatch.setattr(kvgraph, "compile", refuse)
    with pytest.raises(kvgraph.MissingDependencyError) as raised:
        judge("llama")
    assert raised.value.__notes__ == ["case llama: no verdict, as it was not compiled"]


@pytest.mark.parametrize(("result", "written"), [("right", 1), ("other tokens", 0)])
def test_other_tokens_are_not_written(
    result: str, written: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[object] = []
    monkeypatch.setattr(command, "judged", lambda names: [("llama", Verdict(result))])
    monkeypatch.setattr(page, "write", found.append)
    monkeypatch.setattr("sys.argv", ["models", "--write"])
    assert command.main() == 1 - written
    assert len(found) == written
