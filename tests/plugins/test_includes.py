"""Which folder of plugins/ may include which: adapters -> launch -> cpu, cuda -> common; never each
other."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

PLUGINS = Path(__file__).parents[2] / "plugins"
BELOW = {
    "onnxruntime": {"onnxruntime", "abi", "launch", "cpu", "cuda", "common", "kvgraph"},
    "tensorrt": {"tensorrt", "abi", "launch", "cuda", "common", "kvgraph"},
    "launch": {"launch", "cuda", "common", "kvgraph"},
    "cuda": {"cuda", "common", "kvgraph"},
    "cpu": {"cpu", "common", "kvgraph"},
    "common": {"common", "kvgraph"},
    "abi": set[str](),
}


@pytest.mark.parametrize("folder", BELOW)
def test_a_folder_includes_what_is_below_it(folder: str) -> None:
    sources = [*PLUGINS.glob(f"{folder}/*.cpp"), *PLUGINS.glob(f"{folder}/*.h")]
    assert sources
    for source in sources:
        for name in re.findall(r'#include "(\w+)/', source.read_text()):
            assert name in BELOW[folder], f"{source.name} includes {name}/"
