"""Copy an ONNX artifact with shorter windows, so that a few dozen tokens reach beyond them."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import onnx

from kvgraph.contract.file_names import ONNX_NAME
from kvgraph.ops import OPSET_DOMAIN
from kvgraph.signal_handlers import reraise_if_signalled


def with_windows_cut(folder: Path, out: Path, most: int) -> Path:
    """Copy the artifact of `folder` into the empty folder `out`, with windows of the graph cut to
    `most` tokens. Return `out`. The caches keep what the full windows need."""
    paths = [path for path in folder.rglob("*") if path.is_file() and out not in path.parents]
    for path in paths:
        copy = out / path.relative_to(folder)
        copy.parent.mkdir(exist_ok=True)
        if path.name == ONNX_NAME:
            copy.write_bytes(_with_windows_cut(path, most))
        else:
            try:
                os.link(path, copy)  # a reader may refuse symbolic links out of the folder
            except OSError as error:  # a file system without links
                reraise_if_signalled(error)
                shutil.copyfile(path, copy)
    return out


def _with_windows_cut(path: Path, most: int) -> bytes:
    model = onnx.load(str(path), load_external_data=False)
    for node in model.graph.node:
        for attribute in node.attribute:
            if node.domain == OPSET_DOMAIN and attribute.name == "window":
                attribute.i = min(attribute.i, most)
    data: bytes = model.SerializeToString()
    return data
