"""Which folder of plugins/ may include which: adapters -> launch -> cpu, cuda; never each other."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

PLUGINS = Path(__file__).parents[2] / "plugins"
BELOW = {
    "onnxruntime": {"onnxruntime", "abi", "launch", "cpu", "cuda", "kvgraph"},
    "tensorrt": {"tensorrt", "abi", "launch", "cuda", "kvgraph"},
    "launch": {"launch", "cuda", "kvgraph"},
    "cuda": {"cuda", "kvgraph"},
    "cpu": {"cpu", "kvgraph"},
    "abi": set[str](),
}


@pytest.mark.parametrize("folder", BELOW)
def test_a_folder_includes_what_is_below_it(folder: str) -> None:
    sources = [*PLUGINS.glob(f"{folder}/*.cpp"), *PLUGINS.glob(f"{folder}/*.h")]
    assert sources
    for source in sources:
        for name in re.findall(r'#include "(\w+)/', source.read_text()):
            assert name in BELOW[folder], f"{source.name} includes {name}/"
