"""GGUF files: experts as they are stored."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch

import kvgraph
from kvgraph.compiler.checkpoint import Checkpoint
from kvgraph.compiler.frontends import huggingface
from kvgraph.compiler.frontends.gguf import as_folder
from kvgraph.compiler.values import Values
from kvgraph.errors import ModelError
from kvgraph.ops.packed import E2M1, INT8, LEVELS, Form, powers
from tests.compiler import test_gguf_layers
from tests.compiler.test_gguf_architectures import make, refused
from tests.compiler.test_stored_weights import arrays_of, meant
from tests.support import gguf_files, quantized
from tests.support.plans import plan


def test_experts_of_gpt_oss_as_they_are_stored(tmp_path: Path) -> None:
    _, path = make("gpt-oss", tmp_path, "Q8_0", experts="MXFP4")
    with as_folder(path) as folder:
        stacked = [v for name, v in checkpoint(folder).items() if name.endswith("_proj")]
        assert len([each for each in stacked if len(each.shape) == 3]) == 6
        for each in stacked:
            assert each.form == Form(4, 32, E2M1)
            coded = each.open_coded()(1, 3)
            scales = torch.from_numpy(powers(coded.scales.numpy())).repeat_interleave(32, -1)
            numbers = torch.from_numpy(LEVELS[E2M1])[coded.numbers.long()] * scales
            assert torch.equal(numbers.transpose(1, 2), each.read()[1:3])
    manifest = kvgraph.compile(path, tmp_path / "a.kvg", page_size=16, check=False)
    assert manifest.weights == "stored"
    assert not any("rounded" in note for note in manifest.notes)
    planned = plan(path, target="cpu", memory=1 << 30, max_seq_len=None)
    made = (tmp_path / "a.kvg" / "weights.safetensors").stat().st_size
    graph = onnx.load(tmp_path / "a.kvg" / "model.onnx", load_external_data=False).graph
    external = onnx.TensorProto.EXTERNAL
    small = [each for each in graph.initializer if each.data_location != external]
    made += sum(onnx.numpy_helper.to_array(each).nbytes for each in small)
    assert planned.weights == pytest.approx(made, rel=0.03)


@pytest.mark.parametrize("architecture", ["olmoe", "minimax-m2", "gemma4 experts"])
@pytest.mark.parametrize(
    ("kind", "form"),
    [("Q8_0", Form(8, 32, INT8)), ("Q4_0", Form(4, 32)), ("MXFP4", Form(4, 32, E2M1))],
)
def test_experts_of_other_models(kind: str, form: Form, architecture: str, tmp_path: Path) -> None:
    """Gate above up, with any type of linear layers."""
    _, path = test_gguf_layers.make(architecture, tmp_path, kind="Q8_0", experts=kind)
    with as_folder(path) as folder:
        stacked = [v for v in checkpoint(folder).values() if len(v.shape) == 3]
        assert len(stacked) == 4
        for each in stacked:
            assert each.form == form
            assert torch.equal(meant(each.open_coded()(1, 3), form), each.read()[1:3])
    manifest = kvgraph.compile(path, tmp_path / "a.kvg", page_size=16)
    assert manifest.weights == "stored"
    assert not any("rounded" in note for note in manifest.notes)
    planned = plan(path, target="cpu", memory=1 << 30, max_seq_len=None)
    made = sum(array.nbytes for array in arrays_of(tmp_path / "a.kvg").values())
    assert planned.weights == pytest.approx(made, rel=0.02)


@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
def test_gate_and_up_in_one_tensor(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For a model whose files had them apart."""
    tensors = gguf_files.tensors

    def joined(*args: Any) -> dict[str, Any]:
        found = tensors(*args)
        for name in [name for name in found if "ffn_gate_exps" in name]:
            (gate, blocks), (up, _) = found.pop(name), found.pop(name.replace("gate", "up"))
            found[name.replace("gate", "gate_up")] = np.concatenate([gate, up], 1), blocks
        return found

    apart, whole = tmp_path / "apart", tmp_path / "whole"
    apart.mkdir(), whole.mkdir()
    _, path = test_gguf_layers.make("olmoe", apart, experts=kind)
    monkeypatch.setattr(gguf_files, "tensors", joined)
    _, other = test_gguf_layers.make("olmoe", whole, experts=kind)
    with as_folder(path) as folder, as_folder(other) as other_folder:
        wanted, found = checkpoint(folder), checkpoint(other_folder)
    for name, values in wanted.items():
        assert found[name].form == values.form
        assert torch.equal(found[name].read(), values.read()), name


@pytest.mark.parametrize("part", ["gate", "up"])
@pytest.mark.parametrize("kind", ["F32", "MXFP4"])
def test_experts_with_half_of_a_parameter(part: str, kind: str, tmp_path: Path) -> None:
    without = f"blk.1.ffn_{part}_exps.weight"
    _, path = make("gpt-oss", tmp_path, experts=kind, without=without)
    assert re.search(
        r"blk\.1\.ffn_.*_exps.weight: expected \[4, .*\] from its configuration, got \[4, "
        rf".*{quantized.INSTEAD}$",
        refused(path),
    )


def test_a_damaged_exponent(tmp_path: Path) -> None:
    _, path = make("gpt-oss", tmp_path, "Q8_0", experts="MXFP4")

    def first() -> torch.Tensor:
        with as_folder(path) as folder:
            found = checkpoint(folder)
        name = next(name for name in found if name.endswith("0.mlp.experts.down_proj"))
        return found[name].open_coded()(0, 1).numbers

    codes = first()[0, 0, :32].numpy()
    at = path.read_bytes().index((codes[:16] | codes[16:] << 4).tobytes())
    with path.open("r+b") as file:
        file.seek(at - 1)
        file.write(b"\xff")
    said = r"down_exps.weight\[0\]: block 0: expected a finite scale, got exponent 255"
    with pytest.raises(ModelError, match=f"{said}{quantized.INSTEAD}$"):
        first()


def checkpoint(folder: Path) -> Mapping[str, Values]:
    found = huggingface.load(folder, "float32", weightless=True).checkpoint
    assert isinstance(found, Checkpoint)
    return found.values


def test_a_width_of_dense_layers_in_a_file_that_has_none(
    model_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    """It may be larger than each dim."""
    path, width = tmp_path / "model.gguf", {"qwen3moe__feed_forward_length": 6144}
    gguf_files.make(model_folder("qwen3_moe"), path, **width)
    kvgraph.compile(path, tmp_path / "a.kvg", page_size=16)
