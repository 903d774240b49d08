"""TensorRT's registries find the plugins, which link and include nothing of TensorRT."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from kvgraph.ops.native import library_path

REGISTRY = """
import importlib, sys
trt = importlib.import_module(sys.argv[2])
logger = trt.Logger()
builder = trt.Builder(logger) if hasattr(trt, "Builder") else None
registry = builder.get_plugin_registry() if builder else trt.get_plugin_registry()
assert registry.load_library(sys.argv[1])
found = [(c.name, c.plugin_version, c.plugin_namespace) for c in registry.all_creators]
print(sorted(f for f in found if f[2] == "kvgraph"))
creator = registry.get_creator("update_and_attend", "1", "kvgraph")
fields = trt.PluginFieldCollection([])
made = creator.create_plugin("node", fields, trt.TensorRTPhase.BUILD)
from kvgraph.compiler.targets.tensorrt.build import plugin_message
print(made, plugin_message(sys.argv[1]), sep="|")
"""


@pytest.mark.parametrize("module", ["tensorrt_rtx", "tensorrt_dispatch"])
def test_registries_find_the_creators(module: str) -> None:
    """Of TensorRT-RTX, and of the enterprise TensorRT's dispatch runtime (version 11)."""
    if importlib.util.find_spec(module) is None:
        pytest.skip(f"{module} is not installed")
    done = subprocess.run(
        [sys.executable, "-c", REGISTRY, str(library_path("tensorrt")), module],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    found, made = done.stdout.splitlines()
    assert found == str([(op, "1", "kvgraph") for op in
                         ("paged_attention", "store_kv", "update_and_attend")])  # fmt: skip
    assert made == "None|update_and_attend: expected field layer, got none"


def test_nothing_of_tensorrt_was_linked_or_included() -> None:
    library = library_path("tensorrt")
    if shutil.which("readelf"):
        done = subprocess.run(["readelf", "-d", str(library)], capture_output=True, text=True,
                              check=True)  # fmt: skip
        needed = [line for line in done.stdout.splitlines() if "NEEDED" in line]
        assert needed
        assert not any(name in line for line in needed for name in ("nvinfer", "tensorrt", "cuda"))
    sources = Path(__file__).parents[2] / "plugins"
    vendor = [p for p in sources.rglob("*") if re.match(r"NvInfer.*\.h$", p.name)]
    assert vendor == []
