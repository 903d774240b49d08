"""A compile compares what it made with the model: a difference is refused by its layer."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import onnx
import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import kvgraph
from kvgraph import ops
from kvgraph.compiler import packed_weights
from kvgraph.compiler.check import compare, run
from kvgraph.compiler.check.windows import with_windows_cut
from kvgraph.compiler.checkpoint import Checkpoint
from kvgraph.compiler.frontends import masks
from kvgraph.compiler.streamed import Streamed
from kvgraph.contract.manifest import read_manifest
from kvgraph.ops import OPSET_DOMAIN
from tests.support.artifacts import CHECKED
from tests.support.models import make_model

ModelFolder = Callable[[str], Path]


def refusal(model: Any, out: Path, **options: Any) -> str:
    with pytest.raises(kvgraph.CheckError) as refused:
        kvgraph.compile(model, out, page_size=16, **options)
    assert not list(out.parent.glob(f"*{out.name}*")), "nothing is written"
    return str(refused.value)


@pytest.mark.parametrize(
    ("model", "options"),
    [
        ("gemma2", {}),
        ("gemma2", {"weights": "int8", "cache_dtype": "int8"}),
        ("llama", {"weights": "int4"}),
        ("gemma2", {"cache": "continuous"}),
        ("llama", {"cache": "padded"}),
        ("llama", {"backend": "torch"}),
        ("gemma2", {"target": "cuda:sm_90", "dtype": "bfloat16"}),
        ("gemma2", {"target": "cuda:sm_90", "backend": "onnx"}),
    ],
    ids=str,
)
def test_what_is_right_passes(
    model: str, options: dict[str, Any], tmp_path: Path, model_folder: ModelFolder
) -> None:
    manifest = kvgraph.compile(model_folder(model), tmp_path / "out", page_size=16, **options)
    on_cuda = options.get("target", "cpu") != "cpu"
    note = (
        CHECKED.replace("all layers", "one layer of each kind (layers 0, 1)")
        if on_cuda
        else CHECKED
    )
    assert manifest.notes[-1] == note
    assert read_manifest(tmp_path / "out") == manifest


def test_without_it(tmp_path: Path, model_folder: ModelFolder) -> None:
    manifest = kvgraph.compile(model_folder("llama"), tmp_path / "out", check=False)
    assert manifest.notes[-1] == "check: left out (--no-check)"


def lose_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """As before masks were read: what only they knew was gone."""
    monkeypatch.setattr(masks, "_read", lambda mask_function, length: masks.AskedMask(None))
    asked = masks.asked_mask
    monkeypatch.setattr(
        masks, "asked_mask", lambda **asked_for: asked(**asked_for | {"local_size": None})
    )


@pytest.mark.parametrize(
    ("options", "most_bytes"),
    [({}, 1 << 30), ({"weights": "int8"}, 1 << 30), ({}, 0), ({"target": "cuda:sm_90"}, 0)],
    ids=str,
)
def test_lost_window(
    options: dict[str, Any], most_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_model(
        "phimoe",
        tmp_path / "model",
        sliding_window=24,
        num_local_experts=4,
        num_experts_per_tok=2,
        router_jitter_noise=0.0,
        input_jitter_noise=0.0,
        num_hidden_layers=2,
    )
    lose_windows(monkeypatch)
    monkeypatch.setattr(run, "MOST_BYTES", most_bytes)
    message = refusal(folder, tmp_path / "out", **options)
    assert message.startswith("check of 'phimoe': expected the logits of its own forward pass with")
    assert "from layer 0 (PhimoeDecoderLayer) on; nothing was written, --no-check" in message


@pytest.mark.parametrize(("backend", "most_bytes"), [("onnx", 1 << 30), ("onnx", 0)])
def test_kernel_that_is_wrong(
    backend: str,
    most_bytes: int,
    tmp_path: Path,
    model_folder: ModelFolder,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What only the session shows: the model's own layers agree."""
    from kvgraph.compiler.targets import onnx as target

    clean = target._clean

    def spoil(model: Any) -> None:
        clean(model)
        for node in model.graph:
            if node.op_type == "update_and_attend":
                node.attributes.add(target.ir.AttrFloat32("scale", 0.9))

    monkeypatch.setattr(target, "_clean", spoil)
    monkeypatch.setattr(run, "MOST_BYTES", most_bytes)
    message = refusal(model_folder("llama"), tmp_path / "out", backend=backend)
    assert "in the lowered graph; the layers' own code agrees" in message


@pytest.mark.parametrize(
    ("error", "said"), [(0.0321, "0.032"), (0.001049, "0.00105"), (np.inf, "inf")]
)
def test_an_error_is_said_to_exceed_its_limit(error: float, said: str) -> None:
    assert compare.Difference(error, compare.EXACT).text == said


def test_logits_that_are_not_finite(
    tmp_path: Path, model_folder: ModelFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    import kvgraph.build

    def broken(folder: Path, rows: Any, chunk: int) -> list[Any]:
        return [np.full((len(row), 160), np.nan, np.float32) for row in rows]

    monkeypatch.setattr(kvgraph.build, "run_artifact", broken)
    assert "within 0.001 of their spread, got inf in" in refusal(
        model_folder("llama"), tmp_path / "out"
    )


Spoil = Callable[[np.ndarray[Any, Any]], object]
"""Gives the logits of a step of one token, `[vocab]`, from those of its row, `[T, vocab]`."""


def spoil_steps(monkeypatch: pytest.MonkeyPatch, spoil: Spoil, *, in_one_piece: bool) -> None:
    """Other logits of the first row's last token, where it is a step of its own or everywhere."""
    import kvgraph.build

    right = kvgraph.build.run_artifact

    def wrong(folder: Path, rows: Any, chunk: int) -> list[Any]:
        found = right(folder, rows, chunk)
        if in_one_piece or chunk < len(rows[0]):
            found[0][-1] = spoil(found[0])
        return found

    monkeypatch.setattr(kvgraph.build, "run_artifact", wrong)


@pytest.mark.parametrize(
    ("model", "options", "spoil", "said"),
    [
        ("llama", {"weights": "bf16"}, lambda row: np.nan, "got inf in the lowered graph"),
        ("llama", {"weights": "int8"}, lambda row: row[0], "in a step of one token"),
        ("llama", {"weights": "int4"}, lambda row: 0, "in a step of one token"),
        ("qwen3_moe", {"weights": "bf16"}, lambda row: row[0], "in a step of one token"),
        ("qwen3_moe", {"weights": "int4"}, lambda row: 0, "in a step of one token"),
    ],
    ids=["bf16", "int8", "int4", "experts in bf16", "experts in int4"],
)
def test_a_step_of_one_token_that_is_wrong(
    model: str,
    options: dict[str, Any],
    spoil: Spoil,
    said: str,
    tmp_path: Path,
    model_folder: ModelFolder,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spoil_steps(monkeypatch, spoil, in_one_piece=False)
    assert said in refusal(model_folder(model), tmp_path / "out", **options)


def test_a_step_that_is_rounded_as_in_one_piece_passes(
    tmp_path: Path, model_folder: ModelFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after another choice of experts: few tokens may differ, and this is one of them."""
    spoil_steps(monkeypatch, lambda row: row[0], in_one_piece=True)
    manifest = kvgraph.compile(model_folder("llama"), tmp_path / "out", weights="int8")
    assert manifest.notes[-1] == CHECKED


@pytest.mark.parametrize("most_bytes", [1 << 30, 0])
@pytest.mark.parametrize(
    ("window", "note"), [(24, ""), (100, "; windows of 100 tokens were not reached")]
)
def test_windows_that_the_rows_do_not_reach(
    window: int, note: str, most_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model whose code has read its window before it is cut."""
    folder = make_model("mistral", tmp_path / "model", sliding_window=window)
    monkeypatch.setattr(run, "cut_windows", lambda module: contextlib.nullcontext())
    monkeypatch.setattr(run, "MOST_BYTES", most_bytes)
    manifest = kvgraph.compile(folder, tmp_path / "out", page_size=16)
    layers = "all layers" if most_bytes else "one layer of each kind (layer 0)"
    assert manifest.notes[-1] == CHECKED.replace("all layers", layers) + note


@pytest.mark.parametrize("has_links", [True, False])
def test_a_copy_with_shorter_windows(
    has_links: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, out = tmp_path / "artifact", tmp_path / "copy"
    (folder / "rank1").mkdir(parents=True)
    out.mkdir()
    (folder / "rank1" / "weights").write_bytes(b"abc")
    node = onnx.helper.make_node("update_and_attend", [], ["y"], domain=OPSET_DOMAIN, window=64)
    graph = onnx.helper.make_graph([node], "g", [], [])
    onnx.save(onnx.helper.make_model(graph), folder / "model.onnx")
    if not has_links:
        refused = PermissionError(errno.EPERM, "Operation not permitted")
        monkeypatch.setattr(os, "link", mock.Mock(side_effect=refused))
    with_windows_cut(folder, out, 16)
    assert (out / "rank1" / "weights").read_bytes() == b"abc"
    assert (folder / "rank1" / "weights").stat().st_nlink == 1 + has_links
    (made,) = onnx.load(out / "model.onnx").graph.node
    assert [attribute.i for attribute in made.attribute] == [16]


class Traced(nn.Module):
    """Its forward pass is another one while it is exported."""

    def __init__(self, leak: bool) -> None:
        super().__init__()
        self.leak = leak
        self.embed = nn.Embedding(32, 32)
        self.qkv = nn.Linear(32, 64)

    def forward(self, tokens: Any, offsets: Any, at: Any, pool: Any, *index: Any) -> torch.Tensor:
        lengths, table, most = index
        x = self.embed(tokens)
        q, k, v = self.qkv(x).view(x.shape[0], -1, 16).split((2, 1, 1), dim=1)
        scale = 0.5 if self.leak and torch.compiler.is_exporting() else 0.3
        ops.store_kv(pool, k, v, offsets, lengths, table, layer=0)
        out = ops.paged_attention(q, pool, offsets, lengths, table, most, layer=0, scale=scale)
        return (x + out.reshape(x.shape[0], -1))[at.long()] @ self.embed.weight.T


@pytest.mark.parametrize("target", ["cpu", "cuda:sm_90"])
def test_own_module(target: str, tmp_path: Path) -> None:
    devices = kvgraph.virtual_devices(target)
    params = kvgraph.KVCacheParams("float32", 1, 16, 1, page_size=16, devices=tuple(devices))
    options: dict[str, Any] = {"params": params, "vocab_size": 32, "max_seq_len": 64}
    torch.manual_seed(0)
    manifest = kvgraph.compile(Traced(False), tmp_path / "right", target=target, **options)
    assert manifest.notes[-1] == CHECKED
    with pytest.raises(kvgraph.CheckError, match=r"check of 'Traced': .* in its program;"):
        kvgraph.compile(Traced(True), tmp_path / "wrong", target=target, **options)
    assert not (tmp_path / "wrong").exists()


def test_streamed_weights_are_those_of_the_layers_that_stand_for_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_model("gemma2", tmp_path / "model", vocab_size=5000, num_hidden_layers=6)
    read: dict[str, int] = {}
    original = Streamed.read

    def note(self: Streamed, name: str, fake: torch.Tensor) -> torch.Tensor:
        value = original(self, name, fake)
        read[self._checkpoint.values[name].where.rpartition(": ")[2]] = len(value)
        return value

    monkeypatch.setattr(Streamed, "read", note)
    manifest = kvgraph.compile(folder, tmp_path / "out", target="cuda:sm_90", page_size=16)
    assert manifest.notes[-1].endswith("one layer of each kind (layers 0, 1)")
    assert {name.split(".layers.")[1][0] for name in read if ".layers." in name} == {"0", "1"}
    assert max(read.values()) == 4096, "rows of the embedding"
    assert manifest.model.vocab_size == 5000


class Scaled(nn.Module):
    """A parameter that is read by a method, as Gemma 3n's is."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((3,), 2.0))

    def scaled(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale


def test_streamed_weights_reach_methods_of_a_module(monkeypatch: pytest.MonkeyPatch) -> None:
    model, total = nn.Sequential(Scaled()), torch.ones(3)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        model[0].scale = nn.Parameter(mode.from_tensor(model[0].scale))
    streamed = Streamed(Checkpoint({}))
    monkeypatch.setattr(streamed, "read", lambda name, fake: torch.full(fake.shape, 2.0))
    with streamed.within(model), torch.no_grad():
        total += model[0].scaled(torch.ones(3))
        assert model[0].scale.dtype is torch.float32
    assert total.tolist() == [3.0] * 3


def test_packed_weights_that_are_wrong(
    tmp_path: Path, model_folder: ModelFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    scales = packed_weights._scales
    monkeypatch.setattr(
        packed_weights, "_scales", lambda scale, stored: scales(scale[:, ::-1], stored)
    )
    message = refusal(model_folder("llama"), tmp_path / "out", weights="int8")
    assert "in the lowered graph" in message


def test_error_of_a_token() -> None:
    expected = np.array([[1.0, 2.0, 3.0], [0.0, 0.0, 3.0]], np.float32)
    shifted = expected + np.array([[0.0], [1.0]], np.float32)
    errors = compare.errors_of(shifted, expected)
    assert errors[0] == 0
    assert errors[1] == pytest.approx(3**0.5 / 6**0.5)
    half = compare.Tolerance(0.1, 0.5)
    assert compare.difference([shifted], [expected], half).fits
    assert not compare.difference([shifted], [expected], compare.EXACT).fits


@pytest.mark.parametrize("kind", compare.ROUNDED)
def test_a_token_that_is_not_finite_is_enough(kind: str) -> None:
    expected = np.random.default_rng(0).standard_normal((80, 8)).astype(np.float32)
    allowed = compare.tolerance([kind], routed=True)
    found = expected.copy()
    assert compare.difference([found], [expected], allowed).fits
    found[3, 2] = np.nan
    assert not compare.difference([found], [expected], allowed).fits
    expected[3, 2] = np.nan
    assert compare.difference([found], [expected], allowed).fits == (allowed.share < 1)


@pytest.mark.parametrize("kind", ["float16", "bfloat16", "bf16"])
def test_every_token_counts_in_16_bits_without_a_router(kind: str) -> None:
    assert compare.tolerance([kind]).share == 1
    assert compare.tolerance([kind], routed=True).share == compare.ROUTED_SHARE
    assert compare.tolerance(["float32"], routed=True) == compare.EXACT


@pytest.mark.filterwarnings("error")
def test_equal_infinities_do_not_differ() -> None:
    masked = np.array([[1.0, 3.0, -np.inf], [-np.inf] * 3], np.float32)
    assert compare.errors_of(masked, masked).tolist() == [0, 0]
    found = np.array([[1.0, 2.0, -np.inf], [-np.inf, 0.0, -np.inf]], np.float32)
    errors = compare.errors_of(found, masked)
    assert errors[0] == pytest.approx(1 / 2**0.5)
    for other in (found[1:], -masked[1:], np.full((1, 3), np.nan, np.float32)):
        assert compare.errors_of(other, masked[1:]).tolist() == [np.inf]
        assert compare.errors_of(masked[1:], other).tolist() == [np.inf]


def test_tolerance_is_that_of_the_coarsest_part() -> None:
    assert compare.tolerance(["float32", "fp32", "float32"]) == compare.EXACT
    assert compare.tolerance(["float32", "int4", "int8"]) == compare.ROUNDED["int4"]
