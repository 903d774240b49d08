"""An ONNX artifact with shorter windows, so that a few dozen tokens reach beyond them."""

from __future__ import annotations

import os
from pathlib import Path

import onnx

from kvgraph.compiler.targets.onnx import MODEL_NAME
from kvgraph.ops import OPSET_DOMAIN


def with_windows_cut(folder: Path, out: Path, most: int) -> Path:
    """Write the artifact of `folder` into the empty folder `out`, its graph's windows cut to `most`
    tokens. The caches keep what the true windows need."""
    model = onnx.load(str(folder / MODEL_NAME), load_external_data=False)
    for node in model.graph.node:
        for attribute in node.attribute:
            if node.domain == OPSET_DOMAIN and attribute.name == "window":
                attribute.i = min(attribute.i, most)
    (out / MODEL_NAME).write_bytes(model.SerializeToString())
    for path in folder.iterdir():
        if path.is_file() and path.name != MODEL_NAME:
            os.link(path, out / path.name)  # a reader may refuse links out of the folder
    return out
