"""Other engines, by the name that --peers takes; each is one adapter file (see worker.py).

An adapter uses only its engine's public Python API and the standard library, and imports the engine
inside its functions. Besides `load` it says what it needs: `NEEDS` (module -> what pip installs)
and `PRECISIONS`, the classes of weights that it can run; `PREFIX_CACHING` where it has that.
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
"""Name -> file of this folder."""


def adapter(name: str) -> Any:
    """The adapter's module; it imports no engine."""
    return importlib.import_module(f"{__name__}.{PEERS[name]}")
