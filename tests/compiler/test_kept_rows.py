"""Scales of stored weights under which a number would overflow."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import kvgraph
from kvgraph.compiler.kept_rows import in_groups
from kvgraph.errors import ModelError
from tests.compiler.test_stored_weights import checkpoint
from tests.support import quantized

LAYER = "model.layers.1.mlp.up_proj"


def spoil(folder: Path, part: str, value: float) -> None:
    """Make the first number of a part of LAYER another one; bytes are exponents."""
    tensors = load_file(folder / "model.safetensors")
    scale = tensors[f"{LAYER}.{part}"]
    scale.view(-1)[0] = value
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("form", "part", "value", "got"),
    [
        ("w8a8", "weight_scale", 3e38, "3"),
        ("w4a16", "weight_scale", 1e38, "1"),
        ("w4a16-zero-points", "weight_scale", 3e37, "3"),
        ("fp8-channel", "weight_scale", 1e36, "1"),
        ("mxfp4-packed", "weight_scale", 254, "1.7"),
        ("nvfp4", "weight_scale_2", 3e38, ""),
    ],
)
def test_a_number_that_would_overflow(
    form: str, part: str, value: float, got: str, plain: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = quantized.make(form, plain("llama"), tmp_path / "packed")
    spoil(folder, part, value)
    (layer,) = (
        each for name, each in checkpoint(folder).items() if name.endswith(f"{LAYER}.weight")
    )
    rows = in_groups(layer, 0)
    says = r"up_proj.weight\w*\[0\]: group 0: expected a scale that keeps numbers finite"
    end = f": a damaged file{quantized.INSTEAD}$"
    with pytest.raises(ModelError, match=rf"{says} in float32, got {got}.*{end}"):
        rows(0, 2)
    if part == "weight_scale":
        assert len(rows(1, 3).numbers) == 2


@pytest.mark.parametrize("target", ["cpu", "cuda:sm_90"])
def test_a_layer_that_no_check_runs(
    target: str, plain: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = quantized.make("w8a8", plain("llama"), tmp_path / "packed")
    spoil(folder, "weight_scale", 3e38)
    with pytest.raises(ModelError, match=rf"{LAYER}.weight\[0\]: group 0: expected a scale that"):
        kvgraph.compile(folder, tmp_path / "out", target=target, weights="stored", check=False)


def test_a_scale_of_all_numbers_is_named_without_an_index(
    plain: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = quantized.make("nvfp4", plain("llama"), tmp_path / "packed")
    spoil(folder, "weight_scale_2", torch.nan)
    with pytest.raises(
        ModelError, match=r"up_proj\.weight_scale_2: expected a finite scale, got n"
    ):
        kvgraph.compile(folder, tmp_path / "out", check=False)
