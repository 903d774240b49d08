"""What an artifact binds to and computes, against a stored picture (`--update-golden` redraws it).

Bytes and hashes are left out: they change with the compiler's own tools.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

import kvgraph
from kvgraph.contract.plain import to_json, to_plain

GOLDEN = Path(__file__).parents[1] / "golden"
FIELDS = (
    "backend",
    "target",
    "dtype",
    "weights",
    "layout",
    "inputs",
    "outputs",
    "layers",
    "ops",
    "passes",
)

CASES = {
    "tiny-llama": ("tiny-llama", {}),
    "gemma2-two-pools": ("gemma2", {}),
    "gemma2-int8": ("gemma2", {"cache_dtype": "int8"}),
    "tiny-llama-padded": ("tiny-llama", {"cache": "padded"}),
    "tiny-llama-int4": ("tiny-llama", {"weights": "int4"}),
}


@pytest.mark.parametrize("name", CASES)
def test_manifest(name: str, compiled: Callable[..., Path], request: pytest.FixtureRequest) -> None:
    model, options = CASES[name]
    manifest = to_plain(kvgraph.load(compiled(model, **options)).manifest)
    picture = {field: manifest[field] for field in FIELDS}
    path = GOLDEN / f"{name}.json"
    if request.config.getoption("--update-golden"):
        path.write_bytes(to_json(picture, indent=1) + b"\n")
    assert picture == json.loads(path.read_bytes())
