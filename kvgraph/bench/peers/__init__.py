"""Other engines, by their name in --peers; each is one adapter file (see worker.py).

An adapter uses only its engine's public Python API and the standard library, and imports the engine
inside its functions. Besides `load` it has `NEEDS` (package for pip, by module), `PRECISIONS` (the
classes of weights that it can run), and `PREFIX_CACHING` if it supports that.
"""

from __future__ import annotations

import importlib
from typing import Any

PEERS = {
    "llama.cpp": "llama_cpp",
    "onnxruntime-genai": "onnxruntime_genai",
    "openvino": "openvino",
    "transformers": "transformers",
    "vllm": "vllm",
}
"""Module of this folder, by name of the engine."""


def adapter(name: str) -> Any:
    """Import and return the adapter's module; this does not import the engine."""
    return importlib.import_module(f"{__name__}.{PEERS[name]}")
