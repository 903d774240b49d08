"""Weights of an ONNX graph are transposed while they are written, not before."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import onnx
import pytest
from safetensors.torch import load_file

import kvgraph
from kvgraph.compiler.targets import onnx_transposes
from kvgraph.compiler.weights import Weights

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "qwen3_moe"])
def test_no_matrix_is_read_before_the_file_is_written(
    architecture: str,
    tmp_path: Path,
    model_folder: Callable[[str], Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    read: list[str] = []
    whole = Weights.read

    def noted(self: Weights, name: str, dtype: object, shape: tuple[int, ...]) -> object:
        read.extend([name] if len(tuple(shape)) > 1 else [])
        return whole(self, name, dtype, shape)  # type: ignore[arg-type]

    monkeypatch.setattr(Weights, "read", noted)
    monkeypatch.setattr(onnx_transposes, "_read", lambda source: read.append(source.where))
    kvgraph.compile(model_folder(architecture), tmp_path / "out", weights="fp32", check=False)
    assert read == []


def test_a_graph_has_transposed_weights(
    tmp_path: Path, model_folder: Callable[[str], Path]
) -> None:
    folder = model_folder("llama")
    kvgraph.compile(folder, tmp_path / "out", weights="fp32", check=False)
    stored = load_file(folder / "model.safetensors")
    written = load_file(tmp_path / "out" / "weights.safetensors")
    turned = [name for name in written if name.split(".")[-2] in PROJECTIONS]
    assert len(turned) == 7 * sum("q_proj" in name for name in stored)
    for name in turned:
        assert written[name].equal(stored[name.removeprefix("model.")].float().T)
    graph = onnx.load(tmp_path / "out" / "model.onnx", load_external_data=False).graph
    orders = [node.input[0] for node in graph.node if node.op_type == "Transpose"]
    assert not {*orders} & {*turned}
