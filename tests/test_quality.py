"""Quality figures: equal to transformers' where nothing was lost, and worse where something was."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import kvgraph
from kvgraph import cli
from kvgraph.compiler import streamed, values
from kvgraph.contract.manifest import QualityInfo, read_manifest
from kvgraph.quality import measure, record
from kvgraph.quality.reference import score_reference, windows_at_once
from kvgraph.quality.scores import Scores, compare, score
from kvgraph.quality.text import Text, cut_windows, held_out_text, read_text
from tests.support.artifacts import TINY_LLAMA, Compiled
from tests.support.models import make_model

MOST = 700
"""Tokens: a whole window and a piece of one."""


def train_script_text() -> str:
    spec = importlib.util.spec_from_file_location("train", TINY_LLAMA / "train.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return "\n\n".join(module.corpus()[1])


def test_the_text_is_the_one_that_training_held_out() -> None:
    text = held_out_text()
    assert text.content == train_script_text()
    assert "pydoc_data.topics of Python 3." in text.name
    assert text.sha256 == hashlib.sha256(text.content.encode()).hexdigest()


def test_float32_loses_nothing(compiled: Compiled) -> None:
    found = measure(compiled("tiny-llama"), TINY_LLAMA, most_tokens=MOST)
    assert found.tokens == MOST
    assert found.perplexity == pytest.approx(found.reference_perplexity, rel=1e-4)
    assert found.agreement == 1.0
    assert 20 < found.reference_perplexity < 200  # trained, and not on this


@pytest.mark.parametrize("kind", ["continuous", "padded"])
def test_every_kind_of_cache(kind: str, compiled: Compiled) -> None:
    found = measure(compiled("tiny-llama", cache=kind), TINY_LLAMA, most_tokens=150)
    assert found.perplexity == pytest.approx(found.reference_perplexity, rel=1e-4)
    assert found.agreement == 1.0


def test_a_quantised_pool_loses_a_little(compiled: Compiled) -> None:
    found = measure(compiled("tiny-llama", cache_dtype="int8"), TINY_LLAMA, most_tokens=MOST)
    assert found.perplexity != found.reference_perplexity
    assert abs(found.loss) < 0.01
    assert 0.9 < found.agreement < 1.0


def test_broken_weights_show(tmp_path: Path) -> None:
    """An artifact of tiny-llama whose first MLP is eight times too strong."""
    from safetensors.numpy import load_file, save_file

    broken = shutil.copytree(TINY_LLAMA, tmp_path / "broken")
    weights = load_file(broken / "model.safetensors")
    name = "model.layers.0.mlp.down_proj.weight"
    save_file(weights | {name: weights[name] * np.float32(8)}, broken / "model.safetensors")
    kvgraph.compile(broken, tmp_path / "artifact")
    found = measure(tmp_path / "artifact", TINY_LLAMA, most_tokens=MOST)
    assert found.loss > 0.2
    assert found.agreement < 0.8


@pytest.mark.parametrize("bos", [0, None])
def test_windows_hold_every_token_once(bos: int | None) -> None:
    text = held_out_text()
    whole = cut_windows(text, TINY_LLAMA, None, 1 << 20, 1 << 20)[0]
    windows = cut_windows(text, TINY_LLAMA, bos, 128, 1000)
    assert sum(len(window) - 1 for window in windows) == 1000
    assert max(map(len, windows)) == 128
    joined = np.concatenate([window[bos is not None :] for window in windows])
    assert (joined == whole[: len(joined)]).all()
    assert bos is None or {int(window[0]) for window in windows} == {bos}


def test_scores_against_their_definition() -> None:
    rng = np.random.default_rng(0)
    logits = rng.normal(0, 5, (130, 40)).astype(np.float32)
    targets = rng.integers(0, 40, 130)
    found = score(logits, targets)
    wide = logits.astype(np.float64)
    expected = np.log(np.exp(wide).sum(-1)) - wide[np.arange(130), targets]
    np.testing.assert_allclose(found.nats, expected, rtol=1e-5)
    assert found.perplexity == pytest.approx(np.exp(expected.mean()), rel=1e-6)
    assert (found.best == wide.argmax(-1)).all()
    logits[129, 3] = np.nan
    with pytest.raises(kvgraph.ArtifactError, match="expected finite numbers"):
        score(logits, targets)


@pytest.mark.parametrize("architecture", ["llama", "gemma2", "phi"])
def test_large_tables_are_read_in_pieces(
    architecture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of the first and the last layer: the same figures, and neither is ever whole."""
    folder = make_model(architecture, tmp_path / "model", vocab_size=5000)
    rng = np.random.default_rng(0)
    windows = [rng.integers(0, 5000, length, np.int32) for length in (40, 40, 40, 9)]
    expected = score_reference(folder, windows)
    read = streamed.Streamed.read
    sizes: dict[str, int] = {}

    def note(self: streamed.Streamed, name: str, fake: torch.Tensor) -> torch.Tensor:
        sizes[name] = fake.nbytes
        return read(self, name, fake)

    monkeypatch.setattr(streamed.Streamed, "read", note)
    score_reference(folder, windows)
    assert max(sizes.values()) > 1 << 20
    sizes.clear()
    monkeypatch.setattr(streamed, "LARGE", 1 << 19)
    monkeypatch.setattr(values, "PIECE_BYTES", 1 << 17)
    found = score_reference(folder, windows)
    assert 0 < max(sizes.values()) <= 1 << 19
    np.testing.assert_allclose(found.nats, expected.nats, rtol=1e-6)
    assert (found.best == expected.best).all()


def test_windows_run_together_if_their_logits_are_small() -> None:
    sizes = [(512, 512), (512, 151_936), (512, 262_144), (4096, 262_144)]
    assert [windows_at_once(*each) for each in sizes] == [4, 4, 2, 1]


def test_hopeless_scores_stay_plain_numbers() -> None:
    hopeless = Scores(np.full(3, 1e6), np.zeros(3, np.int64))
    info = compare(hopeless, Scores(np.ones(3), np.array([0, 1, 1])), text="t", sha256="00")
    assert np.isfinite(info.perplexity)
    assert info.agreement == pytest.approx(1 / 3, abs=1e-6)


INFO = QualityInfo(
    text="a text",
    sha256="ab" * 32,
    tokens=2048,
    perplexity=73.5,
    reference_perplexity=70.0,
    agreement=0.9876,
)


def test_manifest_and_inspect(compiled: Compiled, tmp_path: Path) -> None:
    folder = shutil.copytree(compiled("tiny-llama"), tmp_path / "artifact")
    assert read_manifest(folder).quality is None
    assert "quality" not in CliRunner().invoke(cli.app, ["inspect", str(folder)]).stdout
    measured = read_manifest(folder)
    assert record(folder, measured, INFO).quality == INFO
    assert read_manifest(folder).quality == INFO
    assert record(folder, measured, INFO).quality == INFO  # a second time too
    kvgraph.load(folder)  # the manifest's own hash is right, and the files are as they were
    shown = " ".join(CliRunner().invoke(cli.app, ["inspect", str(folder)]).stdout.split())
    assert "73.50 (the checkpoint in float32: 70.00, so +5.00%), 98.76% of" in shown
    assert "2,048 tokens of a text" in shown
    in_json = json.loads(CliRunner().invoke(cli.app, ["inspect", str(folder), "--json"]).stdout)
    assert in_json["quality"]["agreement"] == 0.9876


def test_quality_of_another_artifact_is_not_recorded(compiled: Compiled, tmp_path: Path) -> None:
    folder = shutil.copytree(compiled("tiny-llama"), tmp_path / "artifact")
    other = read_manifest(compiled("tiny-llama", weights="int8"))
    before = (folder / "manifest.json").read_bytes()
    message = f"{folder}: expected the artifact that was measured, got another: it was replaced"
    with pytest.raises(kvgraph.ArtifactError, match=message):
        record(folder, other, INFO)
    assert (folder / "manifest.json").read_bytes() == before


def test_the_name_of_a_text_fits_a_manifest(compiled: Compiled, tmp_path: Path) -> None:
    folder = shutil.copytree(compiled("tiny-llama"), tmp_path / "artifact")
    path = tmp_path / "a\nb\x1b\udcff \u2603.txt"
    path.write_text("text")
    text = read_text(path)
    assert text == Text("a\ufffdb\ufffd\ufffd \u2603.txt", "text")
    record(folder, read_manifest(folder), replace(INFO, text=text.name))
    assert read_manifest(folder).quality == replace(INFO, text=text.name)


def test_a_tokenizer_with_more_ids_than_the_model(
    tmp_path: Path, model_folder: Callable[[str], Path]
) -> None:
    """The artifact stays; why there is no figure is one sentence."""
    folder = shutil.copytree(model_folder("llama"), tmp_path / "model")
    shutil.copyfile(TINY_LLAMA / "tokenizer.json", folder / "tokenizer.json")
    out = tmp_path / "out"
    given = ["compile", str(folder), "-o", str(out), "--weights", "int8", "--no-check"]
    done = CliRunner().invoke(cli.app, given)
    assert done.exit_code == 0
    vocab_size = read_manifest(out).model.vocab_size
    said = f"{folder}/tokenizer.json: expected token ids in [0, {vocab_size}), those of the model"
    assert f"note: quality not measured: {said}, got " in done.stderr
    assert f"note: tokenizer: the model's table of {vocab_size} rows has none for " in done.stderr
    with pytest.raises(kvgraph.ModelError, match="expected token ids in"):
        measure(out, folder)


def test_bad_input(compiled: Compiled, tmp_path: Path, model_folder: Callable[[str], Path]) -> None:
    folder = compiled("tiny-llama")
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    with pytest.raises(kvgraph.RequestError, match="binary: expected text in UTF-8"):
        measure(folder, TINY_LLAMA, tmp_path / "binary")
    (tmp_path / "empty").write_text("")
    with pytest.raises(kvgraph.RequestError, match="empty: expected at least two tokens, got 0"):
        measure(folder, TINY_LLAMA, tmp_path / "empty")
    with pytest.raises(FileNotFoundError):
        read_text(tmp_path / "none")
    with pytest.raises(kvgraph.RequestError, match="quality: expected a model of at least 2 token"):
        cut_windows(read_text(None), TINY_LLAMA, None, 1, 10)
    with pytest.raises(kvgraph.RequestError, match="most_tokens: expected >= 1, got 0"):
        measure(folder, TINY_LLAMA, most_tokens=0)
    with pytest.raises(kvgraph.ModelError, match=r"expected tokenizer\.json"):
        measure(compiled("llama"), model_folder("llama"))
