"""The MXFP4 of gpt-oss: numbers are those of transformers' own conversion, bit for bit."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from kvgraph.compiler.checkpoint_files import stored_tensors
from kvgraph.compiler.quantized import weights_of

NAME = "model.layers.0.mlp.experts.gate_up_proj"


def test_numbers_are_those_of_transformers(tmp_path: Path) -> None:
    """All 16 codes, under exponents whose numbers bfloat16 holds."""
    random = np.random.default_rng(0)
    blocks = torch.from_numpy(random.integers(0, 256, (3, 10, 4, 16), np.uint8))
    scales = torch.from_numpy(random.integers(60, 190, (3, 10, 4), np.uint8))
    tensors = {f"{NAME}_blocks": blocks, f"{NAME}_scales": scales}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    config = {"quantization_config": {"quant_method": "mxfp4"}}
    found, _ = weights_of(tmp_path, config, stored_tensors(tmp_path))
    expected = convert_moe_packed_tensors(blocks, scales)
    assert found[NAME].shape == tuple(expected.shape)
    assert found[NAME].read().bfloat16().equal(expected)
