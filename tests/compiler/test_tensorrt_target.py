"""Engines by TensorRT-RTX with kvgraph's plugins, on a machine without a GPU, driver or header.

What the builder does with the plugins is for real here; deserialising an engine needs a GPU.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import re
import shutil
import subprocess
import sys
from base64 import b64decode, b64encode
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx
import pytest

import kvgraph
from kvgraph import UnsupportedError
from kvgraph.contract.dtypes import DTYPES
from kvgraph.contract.manifest import EngineInfo
from kvgraph.contract.signature import GraphSignature, output_name
from kvgraph.errors import MissingDependencyError
from kvgraph.ops.launch_native import KernelsHeader
from kvgraph.ops.native import library_path
from kvgraph.ops.onnx_ops import register_schemas
from kvgraph.runtime.artifact import verify

pytest.importorskip("tensorrt_rtx", reason="engines are built by TensorRT-RTX")
pytest.importorskip("triton", reason="kernels for CUDA are compiled by Triton")

from kvgraph.compiler.targets.tensorrt import engine as trt_engine
from kvgraph.rebuild import rebuild

SLOTS = 20_011
"""Of a pool in these engines: TensorRT's log shows the low 32 bits of a size."""
POOL_BYTES = 2 * SLOTS * 2 * 4 * 16 * 4 * 16

Compiled = Callable[..., Path]
TARGET = "cuda:sm_86,sm_89,sm_120"


@pytest.fixture(scope="module")
def artifact(compiled: Compiled) -> Path:
    return compiled("tiny-llama", "tensorrt", target=TARGET, dtype="bfloat16")


@pytest.fixture
def copy(artifact: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(artifact, tmp_path / "copy"))


def signature_of(folder: Path) -> GraphSignature:
    return verify(folder).signature


def build(folder: Path, archs: list[str], **options: Any) -> EngineInfo:
    signature = signature_of(folder)
    profiles = trt_engine.profiles_of(signature, 2048, 256, 8192)
    for profile in profiles:
        profile.max["num_page_slots"], profile.opt["num_page_slots"] = SLOTS, SLOTS // 2
    return trt_engine.build_engine(folder, signature, profiles, archs, **options)


# ---- the artifact -------------------------------------------------------------------------------


def test_one_engine_for_every_architecture_asked_for(artifact: Path) -> None:
    manifest = verify(artifact).manifest
    assert manifest.target == TARGET
    assert manifest.backend == "tensorrt"
    assert manifest.engine is not None
    assert manifest.engine.archs == ["sm_86", "sm_89", "sm_120"]
    assert manifest.engine.version == importlib.metadata.version("tensorrt-rtx")
    assert manifest.engine.module == "tensorrt_rtx"
    assert set(manifest.nondeterministic_files) == {"build.json", "model.engine"}
    assert {"model.engine", "model.onnx", "weights.safetensors", "libkvgraph_tensorrt.so",
            "kernels/tensorrt.json"} <= set(manifest.files)  # fmt: skip
    library = (artifact / "libkvgraph_tensorrt.so").read_bytes()
    assert library == library_path("tensorrt").read_bytes()


def test_profiles_cover_decode_and_prefill(artifact: Path) -> None:
    engine = verify(artifact).manifest.engine
    assert engine is not None
    decode, prefill = engine.profiles
    assert [decode.name, prefill.name] == ["decode", "prefill"]
    for profile in engine.profiles:
        for dim, least in profile.min.items():
            assert least <= profile.opt[dim] <= profile.max[dim]
        assert profile.min["total_seq_len"] == profile.min["batch_size"] == 1
        assert profile.max["max_num_pages"] == 2048 // 16
    rows = {decode.max[dim] for dim in ("total_seq_len", "batch_size", "num_logits")}
    assert len(rows) == 1, "a decode step has a token, a row and logits each"
    assert prefill.max["total_seq_len"] >= 2048


def test_a_step_has_the_bounds_that_compile_is_given(compiled: Compiled, tmp_path: Path) -> None:
    options = {
        "target": "cuda:sm_86",
        "dtype": "bfloat16",
        "max_batch_size": 6,
        "max_batch_tokens": 64,
    }
    folder = compiled("tiny-llama", "tensorrt", **options)
    for engine in (verify(folder).manifest.engine, rebuild(folder, tmp_path / "again").engine):
        assert engine is not None
        bounds = [
            (p.name, p.max["batch_size"], p.max["num_logits"], p.max["total_seq_len"])
            for p in engine.profiles
        ]
        assert bounds == [("decode", 6, 6, 6), ("prefill", 6, 6, 64)]
        assert all(p.opt[dim] <= p.max[dim] for p in engine.profiles for dim in p.max)


def test_plain_onnx_opens_it_and_its_symbols_are_the_manifests(artifact: Path) -> None:
    register_schemas()
    path = artifact / "model.onnx"
    onnx.checker.check_model(str(path), full_check=True)
    model = onnx.shape_inference.infer_shapes(onnx.load(path), strict_mode=True, data_prop=True)
    known = {value.name: value.type.tensor_type for value in model.graph.value_info}
    for node in model.graph.node:
        if node.domain == "kvgraph":
            out = known[node.output[0]]
            assert out.elem_type == onnx.TensorProto.BFLOAT16
            dims = [d.dim_param or d.dim_value for d in out.shape.dim]
            assert dims == ["total_seq_len", 8, 16]
    signature = signature_of(artifact)
    expected = [[(s.name, list(s.shape)) for s in signature.inputs]]
    expected += [[(output_name(s), list(s.shape)) for s in signature.outputs]]
    for values, symbols in zip((model.graph.input, model.graph.output), expected, strict=True):
        shapes = [(v.name, [d.dim_param or d.dim_value for d in v.type.tensor_type.shape.dim])
                  for v in values]  # fmt: skip
        assert shapes == symbols


# ---- engines of each kind, and what their logs say ----------------------------------------------


@pytest.mark.parametrize("arch", ["sm_86", "sm_89", "sm_120", None])
@pytest.mark.parametrize("aliased", [True, False])
def test_no_layer_copies_the_pool(
    copy: Path, tmp_path: Path, arch: str | None, aliased: bool
) -> None:
    """Only plugins touch it, and the engine has no memory of its size."""
    log = tmp_path / "log"
    build(copy, [arch] if arch else [], aliased=aliased, log=log)
    assert (copy / "model.engine").stat().st_size > 1 << 20
    text = log.read_text()
    chains = pool_chains(text)
    assert len(chains) == 8, "four layers in each of two profiles"
    for layers in (chains[:4], chains[4:]):
        pools = [layer["pools"] for layer in layers]
        assert {layer["kind"] for layer in layers} <= {"PluginV3", "custom_layer"}
        if aliased:
            assert all(len(pair) == 2 for pair in pools)
            assert [a[1] for a in pools[:-1]] == [b[0] for b in pools[1:]], "handed on as it is"
        else:
            assert [pair[0] for pair in pools] == ["kv_blocks"] * 4
            assert [len(pair) for pair in pools] == [1, 1, 1, 2], "the last hands it on"
        assert (pools[0][0], pools[-1][-1]) == ("kv_blocks", "kv_blocks_out")
    assert len(activations(text)) == 2
    assert max(activations(text)) < POOL_BYTES // 5


def pool_chains(log: str) -> list[dict[str, Any]]:
    """Layers of the engine that have a tensor of the pool's dims, in order, with those tensors."""
    found = []
    for line in log.splitlines():
        match = re.match(r"Name: (.*?), LayerType: (\w+), Inputs: ", line)
        names = re.findall(
            r"\{ Name: ([^,]*), (?:Location: \w+, )?Dimensions: \[-1,2,4,16,4,16\]", line
        )
        if match and names:
            pools = [name.removesuffix(" [profile 1]") for name in names]
            found.append({"kind": match[2], "pools": pools})
    return found


def activations(log: str) -> list[int]:
    """Bytes of the engine's own memory, by profile."""
    return [int(n) for n in re.findall(r"Total Activation Memory: (\d+) bytes", log)]


def test_pools_handed_on_without_an_alias_would_be_memory(copy: Path, tmp_path: Path) -> None:
    """Why the switch changes the graph, and that the check above can fail: TensorRT gives every
    layer's pool memory of its own where the plugin does not say that it is the input's."""
    script = """
import sys
from pathlib import Path
from kvgraph.compiler.targets.tensorrt import build as trt_build, engine as trt_engine
rewrite = trt_build._as_plugin
def chained(node, aliased, heads, results):
    rewrite(node, True, {}, results)
    next(a for a in node.attribute if a.name == "aliased").i = 0
trt_build._as_plugin = chained
sys.exit(trt_build.main(sys.argv[1]))
"""
    run = subprocess.run
    log = tmp_path / "log"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            subprocess,
            "run",
            lambda command, **options: run([sys.executable, "-c", script, command[-1]], **options),
        )
        build(copy, ["sm_86"], aliased=False, log=log)
    assert min(activations(log.read_text())) > POOL_BYTES


def test_images_are_in_the_engine_and_not_once_a_layer(artifact: Path) -> None:
    engine = (artifact / "model.engine").read_bytes()
    cubins = sorted(artifact.glob("kernels/*/*.cubin"))
    assert len(cubins) == 15
    for path in cubins:
        assert 1 <= engine.count(path.read_bytes()) <= 2, "once a profile"


@pytest.mark.parametrize(
    ("model", "options"),
    [
        ("tiny-llama", {"target": "cuda:portable", "dtype": "float16"}),
        pytest.param(
            "gemma2",
            {"target": "cuda:sm_89", "dtype": "bfloat16", "cache_dtype": "int8"},
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "gpt_oss", {"target": "cuda:sm_89", "dtype": "bfloat16"}, marks=pytest.mark.slow
        ),
    ],
    ids=["portable", "two int8 pools", "sinks"],
)
def test_other_models_and_caches(compiled: Compiled, model: str, options: dict[str, Any]) -> None:
    manifest = verify(compiled(model, "tensorrt", **options)).manifest
    assert manifest.engine is not None
    assert manifest.engine.archs == ([] if "portable" in options["target"] else ["sm_89"])


# ---- bad input ----------------------------------------------------------------------------------


def test_tensorrt_is_missing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
                             model_folder: Callable[[str], Path]) -> None:  # fmt: skip
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "tensorrt_rtx" else found(name)
    )
    sentence = (
        "backend tensorrt: tensorrt_rtx 1.7.1 or newer is needed to build an engine, not "
        "installed; pip install 'kvgraph[tensorrt]'"
    )
    with pytest.raises(MissingDependencyError, match=f"^{re.escape(sentence)}$"):
        kvgraph.compile(model_folder("tiny-llama"), tmp_path / "out", backend="tensorrt",
                        target="cuda:sm_86", page_size=16)  # fmt: skip
    assert list(tmp_path.iterdir()) == []


def test_tensorrt_is_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "1.6.0.9")
    sentence = (
        "backend tensorrt: expected tensorrt_rtx 1.7.1 or newer, found 1.6.0.9; "
        "pip install 'kvgraph[tensorrt]'"
    )
    with pytest.raises(MissingDependencyError, match=f"^{re.escape(sentence)}$"):
        trt_engine.require_module("tensorrt_rtx")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"target": "cuda:sm_90"}, r"target: expected some of \['sm_75', .*\] or 'portable' for "
         r"backend tensorrt \(TensorRT-RTX builds for no other\), got 'sm_90'"),
        ({"target": "cuda:sm_75", "dtype": "bfloat16"}, "dtype: .* on sm_75, got bfloat16"),
        ({"target": "cpu"}, r"backend: expected one of \['onnx', 'torch'\] for target cpu, got "
         "'tensorrt'"),
        ({"target": "cuda:portable", "backend": "torch"}, "target: expected architectures for "
         "backend torch, got 'cuda:portable'"),
        ({"target": "cuda:portable,sm_86"}, r"expected one of \['sm_75', "),
        ({"page_size": 12}, r"page_size: expected one of \[16, .*\], got 12"),
        ({"cache": "padded"}, "cache: expected 'paged' for target cuda, got 'padded'"),
    ],
)  # fmt: skip
def test_what_no_engine_supports(
    options: dict[str, Any], message: str, tmp_path: Path, model_folder: Callable[[str], Path]
) -> None:
    given = {"target": "cuda:sm_86", "backend": "tensorrt", "page_size": 16} | options
    with pytest.raises(UnsupportedError, match=message):
        kvgraph.compile(model_folder("tiny-llama"), tmp_path / "out", **given)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("field", "value", "sentence"),
    [
        ("head_dim", 64,
         "update_and_attend: q: head_dim: expected 64 from the node's kernels, got 16"),
        ("dtype", DTYPES["float16"].code,
         "update_and_attend: q: expected float16 from the node's kernels, got bfloat16"),
        ("pool_dtype", DTYPES["int8"].code,
         "update_and_attend: kv_blocks: expected int8 from the node's kernels, got bfloat16"),
        ("window", 64,
         "update_and_attend: window: expected 64 from the node's kernels, got 0"),
        ("version", 9,
         "field kernels: expected version 4 of this kvgraph, got 9: compile the model again"),
    ],
)  # fmt: skip
def test_what_the_plugin_lacks_is_named_when_it_is_parsed(
    copy: Path, field: str, value: int, sentence: str
) -> None:
    path = copy / "kernels/tensorrt.json"
    described = json.loads(path.read_text())
    described["kernels"] = [changed(record, field, value) for record in described["kernels"]]
    path.write_text(json.dumps(described))
    expected = f"{copy / 'model.onnx'}: TensorRT refuses it: {sentence}"
    with pytest.raises(UnsupportedError, match=f"^{re.escape(expected)}$"):
        refused(copy)
    assert not (copy / "model.engine").exists(), "no half engine"


def changed(record: str, field: str, value: int) -> str:
    data = bytearray(b64decode(record))
    header = KernelsHeader.from_buffer(data)
    setattr(header if hasattr(header, field) else header.constants, field, value)
    return b64encode(data).decode()


def refused(folder: Path) -> None:
    """Build from changed files, which the manifest no longer describes."""
    from kvgraph.contract.manifest import read_manifest

    manifest = read_manifest(folder)
    signature = GraphSignature(
        tuple(b.symbol() for b in manifest.inputs), tuple(b.symbol() for b in manifest.outputs)
    )
    profiles = trt_engine.profiles_of(signature, 2048, 256, 8192)
    trt_engine.build_engine(folder, signature, profiles, ["sm_86"])


def test_a_node_without_kernels_is_named(copy: Path) -> None:
    path = copy / "kernels/tensorrt.json"
    described = json.loads(path.read_text())
    name = list(described["nodes"])[2]
    del described["nodes"][name]
    path.write_text(json.dumps(described))
    with pytest.raises(
        UnsupportedError, match=rf"tensorrt.json: expected kernels for node '{name}', got none$"
    ):
        refused(copy)


def test_an_aborted_builder_is_one_sentence(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real abort: the parser does not find the library under the name that it looks for."""
    monkeypatch.setattr(trt_engine, "_environment", lambda module, folder: None)
    sentence = (
        "backend tensorrt: expected an engine, but the process that builds it was killed by SIGABRT"
    )
    with pytest.raises(UnsupportedError, match=f"^{sentence}, after '.*'$") as refusal:
        build(copy, ["sm_86"])
    assert "\n" not in str(refusal.value)
    assert not (copy / "model.engine").exists()


def test_an_engine_with_other_bindings_is_refused(copy: Path) -> None:
    signature = signature_of(copy)
    changed = replace(signature, outputs=signature.outputs[:1])
    profiles = trt_engine.profiles_of(signature, 2048, 256, 8192)
    with pytest.raises(UnsupportedError, match=r"^engine: expected \{'logits': .* got .*kv_blocks"):
        trt_engine.build_engine(copy, changed, profiles, ["sm_86"])
    assert not (copy / "model.engine").exists()
