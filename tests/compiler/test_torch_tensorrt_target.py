"""Artifacts of backend torch-tensorrt, and the engine that another machine builds of one.

That machine's torch-tensorrt is a fake one, which asks for the converters of the program's cache
ops; `tests/vendors` has the real one. Its GPU is the fake driver's.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="kernels for CUDA are compiled by Triton")
pytest.importorskip("torch", reason="compiles the program")

from kvgraph.errors import ArtifactError, MissingDependencyError
from kvgraph.rebuild import rebuild
from kvgraph.runtime.artifact import verify
from kvgraph.runtime.folder import ArtifactFolder
from kvgraph.runtime.sessions.tensorrt.engine import _engine_info
from tests.support import command_line
from tests.support.other_machine import other_machine

Compiled = Callable[..., Path]

TENSORRT = """
from types import SimpleNamespace

__version__ = "11.4.0.106"


class INetworkDefinition:
    def add_plugin_v3(self): ...


class Registry:
    all_creators = []

    def load_library(self, path):
        creator = SimpleNamespace(name="update_and_attend", plugin_namespace="kvgraph")
        creator.create_plugin = lambda name, fields, phase: {f.name: f.data for f in fields}
        self.all_creators.append(creator)


registry = Registry()
get_plugin_registry = lambda: registry
PluginFieldType = SimpleNamespace(INT32=0, FLOAT32=1, CHAR=2)
PluginFieldCollection = list
PluginField = lambda name, data, type: SimpleNamespace(name=name, data=data.copy(), type=type)
TensorRTPhase = SimpleNamespace(BUILD=0)
"""

TORCH_TENSORRT = """
import sys
from types import ModuleType, SimpleNamespace

import torch

__version__ = "2.13.0"
converters = {}
dynamo, conversion, utils = (ModuleType(f"torch_tensorrt.{name}") for name in (
    "dynamo", "dynamo.conversion", "dynamo.conversion.converter_utils"))
sys.modules |= {module.__name__: module for module in (dynamo, conversion, utils)}
Input = SimpleNamespace


def dynamo_tensorrt_converter(key, *, supports_dynamic_shapes):
    return lambda converter: converters.setdefault(key, converter)


class Tensor:
    words = {torch.float32: "FLOAT", torch.bfloat16: "BF16", torch.int32: "INT32"}

    def __init__(self, node):
        value = node.meta["val"]
        self.name, self.dtype = node.name, SimpleNamespace(name=self.words[value.dtype])
        self.shape = [d if isinstance(d, int) else -1 for d in value.shape]


class Network:
    def __init__(self):
        self.plugins = []

    def add_plugin_v3(self, inputs, shapes, plugin):
        self.plugins.append([[tensor.name for tensor in inputs], plugin])
        return SimpleNamespace(get_output=lambda i: inputs[0])


def convert(program, *, arg_inputs, require_full_compilation, **options):
    assert options == {"disable_tf32": True, "min_block_size": 1}
    program = program.run_decompositions()
    assert all(weight.isfinite().all() for weight in program.state_dict.values())
    net = Network()
    for node in program.graph.nodes:
        if node.target in converters:
            args, kwargs = torch.fx.map_arg((node.args, node.kwargs), Tensor)
            converters[node.target](SimpleNamespace(net=net), node.target, args, kwargs, node.name)
    said = [[each.name, each.min_shape, each.max_shape, str(each.dtype)] for each in arg_inputs]
    kinds = [[names, sorted(plugin)] for names, plugin in net.plugins]
    images = sum(plugin["images"].nbytes for _, plugin in net.plugins)
    return repr([said, kinds, images]).encode()


conversion.dynamo_tensorrt_converter = dynamo_tensorrt_converter
utils.get_trt_tensor = lambda ctx, value, name: value
dynamo.convert_exported_program_to_serialized_trt_engine = convert
"""


@pytest.fixture(scope="module")
def artifact(compiled: Compiled) -> Path:
    return compiled("tiny-llama", "torch-tensorrt", target="cuda:sm_89,sm_90", dtype="bfloat16")


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment of a machine with torch-tensorrt and a GPU of sm_90."""
    folder = tmp_path_factory.mktemp("machine")
    modules = {"tensorrt": TENSORRT, "torch_tensorrt": TORCH_TENSORRT}
    return {**other_machine(folder, modules, "torch-tensorrt", "2.13.0"), "FAKE_SM": "90"}


def build(machine: dict[str, str], artifact: Path, out: Path) -> subprocess.CompletedProcess[str]:
    command = [*command_line.COMMAND, "compile", "--from-artifact", str(artifact), "-o", str(out)]
    return subprocess.run(command, env=machine, capture_output=True, text=True)


def test_an_artifact_has_all_but_the_engine(artifact: Path) -> None:
    manifest = verify(artifact).manifest
    assert {"model.pt2", "weights.safetensors", "libkvgraph_tensorrt.so"} <= set(manifest.files)
    assert "model.engine" not in manifest.files
    assert {name.split("/")[1] for name in manifest.files if name.endswith(".cubin")} == {
        "sm_89",
        "sm_90",
    }
    assert manifest.ops["kvgraph.update_and_attend"] == 4
    assert any(note.startswith("engine: none yet") for note in manifest.notes)
    sentence = r"expected an engine of TensorRT, got an artifact for torch-tensorrt, which builds "
    with pytest.raises(ArtifactError, match=sentence + r".*kvgraph compile --from-artifact \S+ -o"):
        _engine_info(ArtifactFolder(artifact, manifest))


def test_the_machine_with_the_gpu_builds_the_engine(
    artifact: Path, machine: dict[str, str], tmp_path: Path
) -> None:
    done = build(machine, artifact, tmp_path / "here")
    assert done.returncode == 0, done.stderr
    manifest = verify(tmp_path / "here").manifest
    assert manifest.target == "cuda:sm_90"
    assert manifest.tools["torch-tensorrt"] == "2.13.0"
    assert not [note for note in manifest.notes if note.startswith("engine: none yet")]
    assert "model.engine" in manifest.nondeterministic_files
    engine = manifest.engine
    assert engine is not None
    assert (engine.module, engine.version, engine.archs) == ("tensorrt", "11.4.0.106", ["sm_90"])
    inputs, plugins, images = eval((tmp_path / "here/model.engine").read_text())
    symbols = manifest.signature.inputs
    assert [(name, dtype) for name, _, _, dtype in inputs] == [
        (symbol.name, f"torch.{symbol.dtype}") for symbol in symbols
    ]
    assert list(engine.names) == [*(symbol.name for symbol in symbols), "logits"]
    assert len(plugins) == 4
    pool = engine.names["kv_blocks"]
    assert all(names[1] == pool for names, _ in plugins), "every layer writes the graph's pool"
    assert {"kernels", "images", "pool_out", "scale"} <= set(plugins[0][1])
    cubins = (artifact / "kernels").glob("*/*.cubin")
    attention = [c for c in cubins if "rms_norm" not in c.name and "silu" not in c.name]
    assert images >= sum(c.stat().st_size for c in attention)


def test_what_torch_tensorrt_refuses(
    artifact: Path, machine: dict[str, str], tmp_path: Path
) -> None:
    folder = Path(machine["PYTHONPATH"])
    other = tmp_path / "machine"
    other.mkdir()
    (other / "tensorrt.py").write_text(TENSORRT.replace("add_plugin_v3", "add_plugin_v2"))
    for path in folder.iterdir():
        if path.name != "tensorrt.py":
            (other / path.name).symlink_to(path)
    done = build({**machine, "PYTHONPATH": str(other)}, artifact, tmp_path / "here")
    assert done.returncode == 2
    said = "torch-tensorrt: expected a TensorRT whose INetworkDefinition has add_plugin_v3"
    assert done.stderr.strip().splitlines()[-1].startswith(f"kvgraph: {said}")
    assert not (tmp_path / "here").exists()


def test_without_torch_tensorrt(artifact: Path, tmp_path: Path) -> None:
    with pytest.raises(
        MissingDependencyError, match=r"expected torch-tensorrt to build an engine with, found none"
    ):
        rebuild(artifact, tmp_path / "here")


def test_damaged_kernels(artifact: Path, machine: dict[str, str], tmp_path: Path) -> None:
    from kvgraph.rebuild.torch_engine import kernels_of

    described: dict[str, Any] = json.loads((artifact / "kernels/tensorrt.json").read_text())
    described["images"] = {}
    (tmp_path / "tensorrt.json").write_text(json.dumps(described))
    with pytest.raises(ArtifactError, match=r"tensorrt.json: expected what compile writes"):
        kernels_of(tmp_path)
