"""Which layers of a large model the check of a compile runs."""

from __future__ import annotations

from pathlib import Path

import pytest

import kvgraph
from kvgraph.compiler.check import run
from tests.support import gguf_files
from tests.support.models import make_model

KINDS = {"blk.2.ffn_down": "Q8_0", "blk.3.ffn_down": "Q8_0", "blk.4.attn_v": "Q6_K"}


def test_a_layer_of_each_stored_form(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "MOST_BYTES", 0)
    sizes = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 6}
    plain = make_model("llama", tmp_path / "plain", **sizes)
    file = gguf_files.make(plain, tmp_path / "model.gguf", "Q4_0", kinds=KINDS)
    manifest = kvgraph.compile(file, tmp_path / "out", page_size=16)
    assert manifest.notes[-1].endswith("one layer of each kind (layers 0, 2, 4)")
