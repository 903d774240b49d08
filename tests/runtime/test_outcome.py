"""A request that fails on its own ends with a reason that can be read; the others go on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvgraph
from kvgraph import Engine, GenerationError, SamplingParams
from kvgraph.runtime.artifact import Artifact
from kvgraph.runtime.async_engine import AsyncEngine
from kvgraph.runtime.prefix import write_prefix
from kvgraph.runtime.sampling import NO_TOKEN, Token
from tests.runtime.test_faults import Recalling, assert_whole

SAMPLINGS = {
    "greedy": SamplingParams(max_new_tokens=6, ignore_eos=True),
    "sampled": SamplingParams(max_new_tokens=6, temperature=0.8, seed=1, ignore_eos=True),
    "top-k": SamplingParams(max_new_tokens=6, temperature=0.8, top_k=5, seed=1, ignore_eos=True),
}
GOOD, BAD = list(range(100, 140)), list(range(300, 340))
WHY = "request '{}': expected a logit above -inf from the model, got NaN or -inf for every token"


class Broken(Recalling):
    """Rows whose context begins with BAD have logits of `value` from `length` tokens on."""

    value, length = np.nan, 43

    def _run(self, arrays: list[Any]) -> Any:
        logits = super()._run(arrays)
        _, offsets, indices, pool, cached, table, _ = arrays
        for at, index in enumerate(indices):
            row = int(np.searchsorted(offsets, index, side="right")) - 1
            length = cached[row] + index - offsets[row] + 1
            if pool[table[row, 0], 0, 0, 0, 0, 0] == BAD[0] + 1 and length >= self.length:
                logits[at] = self.value
        return logits


@pytest.fixture(scope="module")
def artifact(compiled: Callable[..., Path]) -> Artifact:
    return kvgraph.load(compiled("tiny-llama"))


def make_engine(artifact: Artifact, kind: type[Recalling] = Broken) -> Engine:
    return Engine(artifact, session=kind(artifact), num_pages=40)


@pytest.mark.parametrize("value", [np.nan, -np.inf])
@pytest.mark.parametrize("name", SAMPLINGS)
def test_logits_without_a_number_end_their_request(
    artifact: Artifact, name: str, value: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a batch, and alone."""
    monkeypatch.setattr(Broken, "value", value)
    sampling = SAMPLINGS[name]
    healthy = make_engine(artifact, Recalling).generate([GOOD, BAD], sampling)
    engine = make_engine(artifact)
    for _ in range(2):
        good, bad = engine.generate([GOOD, BAD], sampling)
        assert (good.token_ids, good.text) == (healthy[0].token_ids, healthy[0].text)
        assert (good.finish_reason, good.error) == ("length", None)
        assert bad.finish_reason == "error"
        assert bad.error == WHY.format(bad.request_id)
        assert bad.token_ids == healthy[1].token_ids[:3]
        assert healthy[1].text.startswith(bad.text)
    assert engine.generate([BAD], sampling)[0].token_ids == healthy[1].token_ids[:3]
    assert engine.failed_requests == 3
    assert engine.generated_tokens == 2 * (6 + 3) + 3
    assert_whole(engine)


def test_what_a_step_says_of_a_failure(artifact: Artifact) -> None:
    engine = make_engine(artifact)
    engine.submit(BAD, SAMPLINGS["greedy"], request_id="bad")
    tokens = [engine.step()[0] for _ in range(4)]
    assert [token.finish_reason for token in tokens] == [None, None, None, "error"]
    assert tokens[3] == Token("bad", NO_TOKEN, "", "error", WHY.format("bad"))
    assert not engine.busy
    assert_whole(engine)


def test_a_stream_says_why_it_ends(artifact: Artifact) -> None:
    engine = make_engine(artifact)
    wanted = engine.generate([BAD], SAMPLINGS["greedy"])[0].text
    pieces: list[str] = []
    with pytest.raises(GenerationError, match="expected a logit above -inf from the model"):
        pieces.extend(engine.stream(BAD, SAMPLINGS["greedy"]))
    assert "".join(pieces) == wanted
    assert_whole(engine)


def test_text_that_waits_for_a_stop_string_comes_with_the_failure(artifact: Artifact) -> None:
    """Also where the text is made again, as behind a step that raised."""
    engine = make_engine(artifact)
    wanted = engine.generate([BAD], SAMPLINGS["greedy"])[0]
    assert len(wanted.text) > 2
    waits = replace(SAMPLINGS["greedy"], stop=wanted.text[1:] + "never")
    done = engine.generate([BAD], waits)[0]
    assert (done.text, done.token_ids) == (wanted.text, wanted.token_ids)
    pieces: list[str] = []
    with pytest.raises(GenerationError, match="expected a logit above -inf from the model"):
        pieces.extend(engine.stream(BAD, waits))
    assert "".join(pieces) == wanted.text
    assert pieces[-1] == wanted.text[1:]
    engine.submit(BAD, waits, request_id="bad")
    tokens = engine.step() + engine.step() + engine.step()
    engine.scheduler.running[0].rewind_output()
    tokens += engine.step()
    assert "".join(token.text for token in tokens) == wanted.text
    assert_whole(engine)


def test_an_async_stream_gives_all_text_before_it_raises(artifact: Artifact) -> None:
    engine = make_engine(artifact)
    wanted = engine.generate([BAD], SAMPLINGS["greedy"])[0].text
    waits = replace(SAMPLINGS["greedy"], stop=wanted[1:] + "never")
    pieces: list[str] = []

    async def task() -> None:
        async with AsyncEngine(engine) as shared:
            async for piece in shared.stream(BAD, waits):
                pieces.append(piece)

    with pytest.raises(GenerationError, match="expected a logit above -inf from the model"):
        asyncio.run(asyncio.wait_for(task(), 60))
    assert "".join(pieces) == wanted


def test_what_a_failed_step_computed_is_not_cached(
    artifact: Artifact, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor written to a prefix: its pages may be no better than its logits."""
    monkeypatch.setattr(Broken, "length", 1)
    engine = make_engine(artifact)
    for _ in range(2):
        assert engine.generate([BAD])[0].error
    assert engine.kv.get_metrics_aggregated().cache_tokens == 0  # type: ignore[attr-defined]
    with pytest.raises(GenerationError, match="expected a logit above -inf"):
        write_prefix(engine, BAD, tmp_path / "bad.kvp")
    assert not list(tmp_path.iterdir())


class PanicException(BaseException):
    """As libraries in Rust raise it."""


@pytest.mark.parametrize("kind", [RuntimeError, TypeError, PanicException])
def test_a_text_that_cannot_be_made_ends_its_request(
    artifact: Artifact, kind: type[BaseException]
) -> None:
    engine = make_engine(artifact, Recalling)
    wanted = engine.generate([GOOD, BAD], SAMPLINGS["greedy"])
    text = engine.generate([BAD], replace(SAMPLINGS["greedy"], max_new_tokens=2))[0].text
    waits = replace(SAMPLINGS["greedy"], stop=wanted[1].text + "never")
    engine.submit(GOOD, SAMPLINGS["greedy"], request_id="good")
    engine.submit(BAD, waits, request_id="bad")
    said = engine.step() + engine.step()

    class Broken:
        special = frozenset[int]()

        @property
        def tokenizer(self) -> Any:
            raise kind("no such word")

    stream: Any = engine.scheduler.running[1].text
    stream._alphabet = Broken()
    while engine.busy:
        said += engine.step()
    good, bad = ([token for token in said if token.request_id == name] for name in ("good", "bad"))
    assert [token.token_id for token in good] == wanted[0].token_ids
    assert [token.token_id for token in bad] == [*wanted[1].token_ids[:2], NO_TOKEN]
    why = f"request 'bad': expected the text of token {wanted[1].token_ids[2]} from the tokenizer"
    assert bad[-1].error == f"{why}, got no such word"
    assert [token.text for token in bad] == ["", "", text]
    assert engine.failed_requests == 1
    assert_whole(engine)
