"""GGUF: rows of a weight are decoded when they are read, and the others are not."""

from __future__ import annotations

import tracemalloc
import warnings
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch

from kvgraph.compiler.frontends import huggingface
from kvgraph.compiler.frontends.gguf import as_folder
from kvgraph.compiler.values import Values
from kvgraph.errors import ModelError
from tests.compiler import test_gguf_layers
from tests.compiler.test_gguf import WIDE
from tests.compiler.test_gguf_architectures import make
from tests.compiler.test_gguf_experts import checkpoint
from tests.support import gguf_files, quantized
from tests.support.models import make_model

TABLE = "model.embed_tokens.weight"


def require_small_peak(values: Values, step: int) -> None:
    """All rows, `step` at a time, take far less memory than the weight."""
    whole, made = values.read(), []
    tracemalloc.start()
    try:
        rows = values.open()
        for start in range(0, values.count, step):
            made.append(torch.equal(rows(start, start + step), whole[start : start + step]))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert all(made)
    assert peak < whole.nbytes / 4


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_K", "F16", "F32"])
def test_a_table_is_never_whole_in_memory(kind: str, tmp_path: Path) -> None:
    folder = make_model("llama", tmp_path / "model", vocab_size=8192, **WIDE)
    path = gguf_files.make(folder, tmp_path / "model.gguf", kind)
    with as_folder(path) as made:
        (table,) = (each for name, each in checkpoint(made).items() if name.endswith(TABLE))
        require_small_peak(table, 64)


@pytest.mark.parametrize("kind", ["Q8_0", "F16", "F32"])
@pytest.mark.parametrize("architecture", ["olmoe", "gpt-oss", "minimax-m2", "gemma4 experts"])
def test_experts_are_decoded_one_by_one(architecture: str, kind: str, tmp_path: Path) -> None:
    of = make if architecture == "gpt-oss" else test_gguf_layers.make
    _, path = of(architecture, tmp_path, kind="Q8_0", experts=kind)
    with as_folder(path) as folder:
        stacked = [each for each in checkpoint(folder).values() if len(each.shape) == 3]
        assert len(stacked) >= 4
        for each in stacked:
            whole, rows = each.read(), each.open()
            assert (rows(0, 0).shape, rows(1, 2).shape) == (
                (0, *each.shape[1:]),
                (1, *each.shape[1:]),
            )
            assert torch.equal(rows(1, 3), whole[1:3])


@pytest.mark.parametrize("kind", ["Q4_K", "Q8_0"])
def test_a_scale_that_is_infinite_gives_no_warning(kind: str, tmp_path: Path) -> None:
    folder = make_model("llama", tmp_path / "model", **WIDE)
    path = gguf_files.make(folder, tmp_path / "model.gguf", kind)
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    with path.open("r+b") as file:
        file.seek(int(tensors["blk.0.ffn_up.weight"].data_offset))
        file.write(np.float16(np.inf).tobytes())
    with as_folder(path) as made, warnings.catch_warnings():
        warnings.simplefilter("error")
        said = r"ffn_up.weight\[0, 0\]: expected a finite number in float32, got (inf|nan)"
        with pytest.raises(ModelError, match=f"{said}{quantized.INSTEAD}$"):
            huggingface.load(made, "float32")
