"""What a manifest says of a quantised checkpoint's weights that get more bits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import kvgraph
from kvgraph.compiler import options, pipeline
from kvgraph.compiler.model import Model
from tests.support import gguf_files, quantized
from tests.support.models import make_model


@pytest.mark.parametrize(
    ("target", "backend", "weights", "packs"),
    [
        ("cpu", "torch", None, "packs weights only with --weights"),
        ("cuda:sm_90", "onnx", None, "packs no weights"),
        ("cpu", "torch", "stored", ""),
        ("cpu", "onnx", None, ""),
        ("cpu", "onnx", "fp32", ""),
        ("cuda:sm_90", "torch", None, ""),
    ],
)
@pytest.mark.parametrize("is_quantized", [True, False])
def test_weights_that_are_widened_are_named(
    is_quantized: bool, target: str, backend: str, weights: str | None, packs: str
) -> None:
    given = weights if is_quantized else None
    request = options.resolve(target, backend, weights=given, cache_dtype=None, page_size=16)
    settled = request.settled_weights("bfloat16", is_quantized=is_quantized)
    model = Model(nn.Identity(), "llama", (), 1, 1, "bfloat16", is_quantized=is_quantized)
    kind = target.partition(":")[0]
    assert pipeline.notes_of_widened(model, settled, request) == bool(packs and is_quantized) * [
        f"weights: widened from the checkpoint's to bfloat16, since backend {backend} on {kind} "
        f"{packs}"
    ]


def test_an_artifact_says_that_weights_are_widened(
    plain: Callable[[str], Path], tmp_path: Path
) -> None:
    folder, out = quantized.make("awq", plain("llama"), tmp_path / "model"), tmp_path / "a.kvg"
    target = {"target": "cuda:sm_90", "backend": "onnx"}
    manifest = kvgraph.compile(folder, out, page_size=16, check=False, **target)  # type: ignore[arg-type]
    assert manifest.weights == "float32"
    start = "weights: widened from the checkpoint's to float32, since backend onnx"
    assert [note for note in manifest.notes if note.startswith(start)]


@pytest.mark.parametrize("dtype", ["float16", "float32", "bfloat16"])
def test_a_plain_head_that_loses_bits_is_named(
    dtype: str, plain: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = quantized.make("awq", plain("llama"), tmp_path / "model")
    path, head = folder / "model.safetensors", "lm_head.weight"
    tensors = load_file(path)
    tensors[head] = tensors[head].to(getattr(torch, dtype))
    save_file(tensors, path, {"format": "pt"})
    manifest = kvgraph.compile(folder, tmp_path / "a.kvg", page_size=16, check=False)
    note = f"weights: bf16 for 1 layer that the checkpoint has in {dtype}, whose numbers lose bits"
    assert (note in manifest.notes) == (dtype != "bfloat16"), manifest.notes


def test_a_plain_layer_of_a_gguf_file_is_named(tmp_path: Path) -> None:
    sizes = {"hidden_size": 256, "tie_word_embeddings": False, "num_hidden_layers": 1}
    folder = make_model("llama", tmp_path / "model", **sizes)
    file = gguf_files.make(folder, tmp_path / "m.gguf", "Q8_0", kinds={"ffn_down": "F16"})
    manifest = kvgraph.compile(file, tmp_path / "a.kvg", page_size=16, check=False)
    assert (
        "weights: bf16 for 1 layer that the checkpoint has in float16, whose numbers lose bits"
        in (manifest.notes)
    )


@pytest.mark.parametrize(("target", "kind"), [("cpu", "bf16"), ("cuda:sm_90", "float32")])
def test_a_layer_with_one_plain_expert_is_named(
    target: str, kind: str, plain: Callable[[str], Path], tmp_path: Path
) -> None:
    """Gate and up are one layer, and down is another."""
    folder = quantized.make("w4a16", plain("qwen3_moe"), tmp_path / "model")
    quantized.mixed(folder, plain("qwen3_moe"), "model.layers.0.mlp.experts.1.")
    out = tmp_path / "a.kvg"
    manifest = kvgraph.compile(folder, out, target=target, page_size=16, check=False)
    assert (
        "weights: 2 of the layers that the checkpoint has in fewer bits are rounded to "
        f"{kind}, since no kernel takes their form, or that of a layer beside them; all experts of "
        "a layer count as two: gate with up, and down"
    ) in manifest.notes
