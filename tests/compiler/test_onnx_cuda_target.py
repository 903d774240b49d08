"""An ONNX artifact for CUDA: kernels in the graph's nodes, symbols of the manifest, equal bytes."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import onnx
import onnx_ir
import pytest
from onnx.reference import ReferenceEvaluator

import kvgraph
from kvgraph import UnsupportedError
from kvgraph.compiler.passes.cast_norms import cast_norms
from kvgraph.contract.dtypes import DTYPES
from kvgraph.contract.signature import output_name
from kvgraph.kernels.record import IMAGE_HEADER, archs_of, image_digests
from kvgraph.ops.launch_native import KernelsHeader
from kvgraph.ops.native import library_path
from kvgraph.ops.onnx_ops import reference_ops, register_schemas
from kvgraph.runtime.artifact import verify
from tests.support.models import layers, make_model

pytest.importorskip("triton", reason="kernels for CUDA are compiled by Triton")

Compiled = Callable[..., Path]
TARGET = "cuda:sm_80,sm_90"


@pytest.fixture(scope="module")
def folder(compiled: Compiled) -> Path:
    return compiled("gemma2", "onnx", target=TARGET, dtype="float16")


def cache_nodes(folder: Path) -> list[dict[str, Any]]:
    """Attributes of each cache op by name."""
    graph = onnx.load(folder / "model.onnx", load_external_data=False).graph
    return [
        {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
        for node in graph.node
        if node.domain == "kvgraph"
    ]


def images_in(packed: bytes) -> list[str]:
    """SHA-256 of each, after a check that it is."""
    found = []
    while packed:
        digest, size = IMAGE_HEADER.unpack_from(packed)
        image, packed = packed[IMAGE_HEADER.size :][:size], packed[IMAGE_HEADER.size + size :]
        assert hashlib.sha256(image).digest() == digest
        assert image.startswith(b"\x7fELF")
        found.append(digest.hex())
    return found


def test_every_node_has_kernels_and_the_first_of_a_kind_carries_their_images(folder: Path) -> None:
    nodes = cache_nodes(folder)
    records = [node["kernels"].raw_data for node in nodes]
    assert len(nodes) == layers("gemma2")
    assert records[0] == records[2]
    assert records[0] != records[1], "one kind sees a window"
    for record, node in zip(records, nodes, strict=True):
        assert [arch.arch for arch in archs_of(record)] == [b"sm_80", b"sm_90"]
        constants = KernelsHeader.from_buffer_copy(record).constants
        assert constants.dtype == DTYPES["float16"].code
        assert constants.window == node["window"]
    carried = [images_in(node["images"].raw_data) if "images" in node else [] for node in nodes]
    assert carried[2:] == [[]]
    together = [digest for images in carried for digest in images]
    assert len(together) == len(set(together)), "an image travels once"
    assert set(together) == {digest for record in records for digest in image_digests(record)}


def test_plain_onnx_opens_and_infers_it(folder: Path) -> None:
    register_schemas()
    path = folder / "model.onnx"
    onnx.checker.check_model(str(path), full_check=True)
    model = onnx.shape_inference.infer_shapes(onnx.load(path), strict_mode=True, data_prop=True)
    known = {value.name: value for value in model.graph.value_info}
    for node in model.graph.node:
        if node.domain == "kvgraph":
            assert dims(known[node.output[0]]) == ["total_seq_len", 4, 16]


def test_other_readers_of_onnx_open_it(folder: Path) -> None:
    """No attribute is a string that cannot be decoded."""
    path = folder / "model.onnx"
    ReferenceEvaluator(str(path), new_ops=reference_ops())
    nodes = [node for node in onnx_ir.load(path).graph if node.domain == "kvgraph"]
    for name in ("kernels", "images"):
        assert nodes[0].attributes[name].as_tensor().dtype == onnx_ir.DataType.UINT8


def test_onnx_runtime_takes_its_types_and_attributes(folder: Path) -> None:
    """On the CPU's provider, which has kernels for float16: the installed build has no other."""
    ort = pytest.importorskip("onnxruntime", reason="loads the graph")
    options = ort.SessionOptions()
    options.register_custom_ops_library(str(library_path("onnxruntime")))
    session = ort.InferenceSession(str(folder / "model.onnx"), options, ["CPUExecutionProvider"])
    pools = ["sliding.kv_blocks_out", "full.kv_blocks_out"]
    assert [(o.name, o.type) for o in session.get_outputs()] == [
        ("logits", "tensor(float)"), *((name, "tensor(float16)") for name in pools)
    ]  # fmt: skip


def test_gemmas_norms_compute_in_float32(folder: Path) -> None:
    """As the model says: the exporter folds its casts away, and onnx takes that for an error."""
    [report] = [each for each in verify(folder).manifest.passes if each.name == "cast_norms"]
    nodes = onnx.load(folder / "model.onnx", load_external_data=False).graph.node
    norms = [node for node in nodes if node.op_type == "RMSNormalization"]
    casts = {node.output[0]: node for node in nodes if node.op_type == "Cast"}
    assert (report.applied, report.unmatched) == (len(norms), [])
    for norm in norms:
        assert [a.i for a in casts[norm.input[0]].attribute] == [onnx.TensorProto.FLOAT]
    assert verify(folder).manifest.ops["Cast"] == len(casts)


def test_a_norm_of_unknown_dtypes_is_said() -> None:
    norm = onnx.helper.make_node("RMSNormalization", ["x", "scale"], ["y"])
    report = cast_norms(onnx.helper.make_graph([norm], "norm", [], []))
    assert (report.applied, report.unmatched) == (
        0, ["y: expected dtypes of ['x', 'scale'], got none"]
    )  # fmt: skip


def dims(value: Any) -> list[int | str]:
    return [d.dim_param or d.dim_value for d in value.type.tensor_type.shape.dim]


def test_its_symbols_are_the_manifests(folder: Path) -> None:
    signature = verify(folder).signature
    graph = onnx.load(folder / "model.onnx", load_external_data=False).graph
    types = {"float32": 1, "int32": 6, "float16": 10}
    for values, symbols, name in (
        (graph.input, signature.inputs, lambda symbol: symbol.name),
        (graph.output, signature.outputs, output_name),
    ):
        assert [(v.name, dims(v), v.type.tensor_type.elem_type) for v in values] == [
            (name(s), list(s.shape), types[s.dtype]) for s in symbols
        ]


def test_the_manifest(folder: Path) -> None:
    manifest = verify(folder).manifest
    assert (manifest.backend, manifest.target, manifest.dtype) == ("onnx", TARGET, "float16")
    assert manifest.nondeterministic_files == ["build.json"]
    assert manifest.ops["kvgraph.update_and_attend"] == layers("gemma2")
    assert [note for note in manifest.notes if "nothing of this has run on a GPU" in note]
    assert "triton" in manifest.tools


@pytest.mark.fresh_kernels
def test_compiling_twice_gives_the_same_bytes(tmp_path: Path) -> None:
    register_schemas()
    model = make_model("llama", tmp_path / "llama")
    for name in ("one", "two"):
        kvgraph.compile(
            model, tmp_path / name, backend="onnx", target="cuda:sm_80", dtype="bfloat16"
        )
    onnx.checker.check_model(str(tmp_path / "one" / "model.onnx"), full_check=True)
    for path in (tmp_path / "one").iterdir():
        if path.name != "build.json":
            assert path.read_bytes() == (tmp_path / "two" / path.name).read_bytes(), path.name


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"target": "cuda:portable"},
         "target: expected architectures for backend onnx, got 'cuda:portable'"),
        ({"cache": "padded"}, "cache: expected 'paged' for target cuda, got 'padded'"),
        ({"target": "cuda:sm_75", "dtype": "bfloat16"}, "bfloat16.*sm_75|sm_75.*bfloat16"),
    ],
)  # fmt: skip
def test_what_is_refused(tmp_path: Path, options: dict[str, Any], sentence: str) -> None:
    model = make_model("llama", tmp_path / "llama")
    with pytest.raises(UnsupportedError, match=sentence):
        kvgraph.compile(
            model, tmp_path / "out", backend="onnx", **{"target": "cuda:sm_80", **options}
        )
    assert not (tmp_path / "out").exists()
