"""What an artifact binds to and computes, against a stored picture (`--update-golden` redraws it).

Bytes and hashes are left out: they change with the compiler's own tools.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

import kvgraph

GOLDEN = Path(__file__).parents[1] / "golden"
FIELDS = ("backend", "target", "dtype", "layout", "inputs", "outputs", "layers", "ops", "passes")

CASES = {
    "tiny-llama": ("tiny-llama", {}),
    "gemma2-two-pools": ("gemma2", {}),
    "gemma2-int8": ("gemma2", {"cache_dtype": "int8"}),
    "tiny-llama-padded": ("tiny-llama", {"cache": "padded"}),
}


@pytest.mark.parametrize("name", CASES)
def test_manifest(name: str, compiled: Callable[..., Path], request: pytest.FixtureRequest) -> None:
    model, options = CASES[name]
    manifest = msgspec.to_builtins(kvgraph.load(compiled(model, **options)).manifest)
    picture = {field: manifest[field] for field in FIELDS}
    path = GOLDEN / f"{name}.json"
    if request.config.getoption("--update-golden"):
        path.write_bytes(msgspec.json.format(msgspec.json.encode(picture), indent=1) + b"\n")
    assert picture == msgspec.json.decode(path.read_bytes())
