"""Copy an ONNX artifact with shorter windows, so that a few dozen tokens reach beyond them."""

from __future__ import annotations

import os
import shutil
from dataclasses import replace
from pathlib import Path

import onnx

from kvgraph.contract.file_names import ONNX_NAME
from kvgraph.contract.manifest import MANIFEST_NAME, Manifest, read_manifest, write_manifest
from kvgraph.ops import OPSET_DOMAIN
from kvgraph.signal_handlers import reraise_if_signalled


def with_windows_cut(folder: Path, out: Path, most: int) -> Path:
    """Copy the artifact of `folder` into the empty folder `out`, with windows of the graph, and of
    the layers in the manifest, cut to `most` tokens. Return `out`."""
    paths = [path for path in folder.rglob("*") if path.is_file() and out not in path.parents]
    for path in paths:
        copy = out / path.relative_to(folder)
        copy.parent.mkdir(exist_ok=True)
        if path.name == ONNX_NAME:
            copy.write_bytes(_with_windows_cut(path, most))
        elif path.name == MANIFEST_NAME:
            write_manifest(out, _with_layers_cut(read_manifest(folder), most))
        else:
            try:
                os.link(path, copy)  # a reader may refuse symbolic links out of the folder
            except OSError as error:  # a file system without links
                reraise_if_signalled(error)
                shutil.copyfile(path, copy)
    return out


def _with_layers_cut(manifest: Manifest, most: int) -> Manifest:
    windows = [None if each.window is None else min(each.window, most) for each in manifest.layers]
    layers = zip(manifest.layers, windows, strict=True)
    return replace(manifest, layers=[replace(layer, window=window) for layer, window in layers])


def _with_windows_cut(path: Path, most: int) -> bytes:
    model = onnx.load(str(path), load_external_data=False)
    for node in model.graph.node:
        for attribute in node.attribute:
            if node.domain == OPSET_DOMAIN and attribute.name == "window":
                attribute.i = min(attribute.i, most)
    data: bytes = model.SerializeToString()
    return data
