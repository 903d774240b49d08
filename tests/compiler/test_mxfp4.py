"""Experts in MXFP4 (gpt-oss) are read as transformers reads them."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from kvgraph.compiler.checkpoint_files import stored_tensors
from kvgraph.compiler.quantized.mxfp4 import weights
from kvgraph.compiler.quantized.parts import Parts

EXPERTS, OUTPUTS, GROUPS = 2, 24, 8
STEM = "model.layers.0.mlp.experts.down_proj"


def test_numbers_are_those_of_transformers(tmp_path: Path) -> None:
    """Every byte of numbers, and every exponent under which they are finite."""
    generator = torch.Generator().manual_seed(7)
    size = EXPERTS * OUTPUTS * GROUPS
    blocks = torch.randint(0, 256, (size, 16), generator=generator, dtype=torch.uint8)
    blocks.view(-1)[:256] = torch.arange(256)
    exponents = torch.arange(size).remainder(253)
    blocks = blocks.reshape(EXPERTS, OUTPUTS, GROUPS, 16)
    scales = exponents.to(torch.uint8).reshape(EXPERTS, OUTPUTS, GROUPS)
    tensors = {f"{STEM}_blocks": blocks, f"{STEM}_scales": scales}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    found = weights(Parts(tmp_path, "mxfp4", stored_tensors(tmp_path)), {})[STEM].read()
    for dtype in (torch.bfloat16, torch.float32):
        meant = convert_moe_packed_tensors(blocks, scales, dtype=dtype)
        assert meant.isfinite().all()
        bits = torch.int16 if dtype == torch.bfloat16 else torch.int32
        ours = found.to(dtype).contiguous()
        assert ours.shape == meant.shape
        assert torch.equal(ours.view(bits), meant.contiguous().view(bits))
