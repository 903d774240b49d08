"""What a manifest says of a quantised checkpoint's weights that get more bits."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from torch import nn

import kvgraph
from kvgraph.compiler import options, pipeline
from kvgraph.compiler.model import Model
from tests.support import quantized


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
        f"{kind}, since no kernel takes their form, or that of a layer beside them"
    ) in manifest.notes
