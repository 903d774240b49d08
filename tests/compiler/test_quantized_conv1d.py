"""Quantised checkpoints of models whose layers have weights `[inputs, outputs]` (GPT-2)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import kvgraph
from kvgraph.compiler.frontends import huggingface
from tests.support import quantized

LAYERS = ("c_attn.weight", "c_proj.weight", "c_fc.weight")
SQUARE = ("attn.c_proj.weight",)


BY_INPUT = ["gptq", "gptq-act-order", "awq"]
"""Methods that pack inputs, so that their rows are outputs; the others pack rows as they are."""

FORMS = ["w4a16", "w4a16-zero-points", "w8a8", "w8a16-channel", "fp8-channel", "fp8-block", "fp8"]
FORMS += ["mxfp4-packed", "nvfp4", "nvfp4-packed", "mxfp8"]


@pytest.mark.parametrize("form", [*BY_INPUT, *FORMS])
@pytest.mark.parametrize("packed", [LAYERS, SQUARE])
def test_weights_are_those_of_the_layer(
    packed: tuple[str, ...], form: str, plain: Callable[[str], Path], tmp_path: Path
) -> None:
    """No shape of a square weight shows whether it is transposed. compressed-tensors and others
    know no inputs: their groups are of the last dim, here outputs."""
    config, pack = quantized.FORMS[form]
    stored, wanted = {}, {}
    for name, weight in load_file(plain("gpt2") / "model.safetensors").items():
        stored[name] = weight
        if name.endswith(packed):
            del stored[name]
            weight = weight.float()
            parts, meant = pack(weight.T.contiguous() if form in BY_INPUT else weight)
            stored |= {name.removesuffix("weight") + end: part for end, part in parts.items()}
            wanted[name] = meant.T if form in BY_INPUT else meant
    quantized.save(plain("gpt2"), tmp_path / "packed", stored, config)
    state = huggingface.load(tmp_path / "packed", "float32").module.state_dict()
    for name, weight in wanted.items():
        found = [each for key, each in state.items() if key.endswith(name)]
        assert len(found) == 1
        assert torch.equal(found[0], weight), name
    if packed is LAYERS and form in (*BY_INPUT, "w4a16", "w8a8"):
        kvgraph.compile(tmp_path / "packed", tmp_path / "out", page_size=16)
