"""`kvgraph plan`: figures of a checkpoint that is not read, on hardware that is not here."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import onnx
import pytest
from safetensors import safe_open

import kvgraph
from kvgraph import ParamsError, UnsupportedError
from kvgraph.compiler.described import ModelSizes
from kvgraph.compiler.frontends import stored
from kvgraph.compiler.frontends.folder import read_config
from kvgraph.compiler.frontends.lengths import ORIGINAL
from kvgraph.contract.plain import to_plain
from kvgraph.contract.safetensors import read_layout
from kvgraph.kv.memory import DEFAULT_BATCH_SIZE
from tests.support.models import OVERRIDES, make_model, sizes_of
from tests.support.plans import LLAMA_8B, plan

TINY_LLAMA = Path(__file__).parents[2] / "examples" / "tiny-llama"

Compiled = Callable[..., Path]

TABLE = 131072 * 128 * 4
"""Cosines and sines of Llama's positions."""


@pytest.fixture
def llama_8b(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    return tmp_path


def test_llama_8b_on_80_gib(llama_8b: Path) -> None:
    made = plan(llama_8b)
    assert made.weights == 2 * 8_030_261_248 + TABLE
    assert made.weights_dtype == made.dtype == "bfloat16"
    assert made.bytes_per_page == {"": 16_777_216}
    step = 2048 * (2 * 4096 + 4 * 14336) * 2 + (256 + 128) * 128256 * 4
    assert made.reserve.nbytes == step
    rest = (80 << 30) - made.weights - step
    assert made.kept == rest - int(rest * 0.9)
    assert made.pages == {"": int(rest * 0.9) // 16_777_216} == {"": 3717}
    assert made.concurrent_requests == 3717 // 64
    assert made.warnings == []
    assert made.longest_context == 8192


def test_a_quantised_pool_nearly_doubles_the_pages(llama_8b: Path) -> None:
    assert plan(llama_8b, cache_dtype="int8").bytes_per_page == {"": 8_388_608 + 262_144}


@pytest.mark.parametrize(("name", "tables"), [("gemma2", 1), ("gemma3_text", 2), ("gpt_oss", 1)])
def test_the_weights_are_the_checkpoints_and_rotary_tables(
    model_folder: Callable[[str], Path], name: str, tables: int
) -> None:
    with safe_open(model_folder(name) / "model.safetensors", framework="np") as file:
        stored = sum(file.get_tensor(key).nbytes for key in file.keys())  # noqa: SIM118
    table = 512 * 16 * 4
    assert plan(model_folder(name), max_seq_len=None).weights == stored + tables * table


def test_positions_that_depended_on_the_length_have_a_table(tmp_path: Path) -> None:
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "factor": 2.0}
    rope |= {"short_factor": [1.0] * 64, "long_factor": [2.0] * 64}
    rope |= {"original_max_position_embeddings": 65536}
    weights = {}
    for name, scaling in (("plain", {}), ("longrope", {"rope_parameters": rope})):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(LLAMA_8B | scaling))
        weights[name] = plan(tmp_path / name).weights
    assert weights["plain"] == weights["longrope"]


# -- by the checkpoint's own files, and by transformers

HIDDEN = ("torch", "transformers", "onnx", "onnxruntime")
WITHOUT = f"""
import sys
options, folders = sys.argv[1:3], sys.argv[3:]
sys.modules.update(dict.fromkeys({HIDDEN!r}))
from kvgraph.cli import main
for folder in folders:
    sys.argv = ["kvgraph", "plan", folder, "--memory", "1GiB", "--json", *options]
    try:
        main()
    except SystemExit as stop:
        if stop.code:
            raise
"""


def configure(folder: Path, source: Path, **changes: Any) -> Path:
    """A copy of `source` whose config.json has these fields; None removes one."""
    shutil.copytree(source, folder)
    config = json.loads((source / "config.json").read_text()) | changes
    left = {name: value for name, value in config.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(left))
    return folder


def described(folder: Path) -> ModelSizes:
    return stored.describe(folder, read_config(folder), by_shape=True)


@pytest.mark.parametrize("architecture", [name for name in OVERRIDES if name in stored.FAMILIES])
def test_a_checkpoint_is_described_without_torch_as_transformers_builds_it(
    architecture: str, model_folder: Callable[[str], Path]
) -> None:
    folder = model_folder(architecture)
    assert described(folder) == sizes_of(folder)


YARN = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 256}
OLDER: dict[str, tuple[str, dict[str, Any]]] = {
    "llama of 2023": ("llama", {"rope_parameters": None, "head_dim": None, "rope_theta": 1e4}),
    "llama, linear": ("llama", {"rope_scaling": {"type": "linear", "factor": 2.0}}),
    "mistral without a window": ("mistral", {"sliding_window": 0}),
    "qwen2 of 2024": ("qwen2", {"layer_types": None, "rope_parameters": None, "rope_theta": 1e6}),
    "qwen2 that slides": (
        "qwen2",
        {
            "layer_types": None,
            "use_sliding_window": True,
            "sliding_window": 24,
            "max_window_layers": 3,
        },
    ),
    "qwen3, yarn": ("qwen3", {"rope_scaling": YARN}),
    "qwen3, yarn in the older field, none in the newer": (
        "qwen3",
        {"rope_scaling": YARN, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
    ),
    "gemma2 of 2024": ("gemma2", {"layer_types": None, "tie_word_embeddings": None}),
    "gemma3 of 2025": (
        "gemma3_text",
        {
            "layer_types": None,
            "rope_parameters": None,
            "rope_scaling": {"type": "linear", "factor": 8.0},
        },
    ),
    "gpt_oss without rope": ("gpt_oss", {"rope_parameters": None, "layer_types": None}),
}


@pytest.mark.parametrize("case", OLDER)
def test_configurations_as_older_versions_wrote_them(
    case: str, model_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    architecture, changes = OLDER[case]
    folder = configure(tmp_path / "model", model_folder(architecture), **changes)
    if changes.get("sliding_window") == 0:
        config = json.loads((folder / "config.json").read_text()) | {"sliding_window": None}
        (folder / "config.json").write_text(json.dumps(config))
    assert described(folder) == sizes_of(folder)


def test_every_option_of_a_checkpoint_s_shapes(tmp_path: Path) -> None:
    """Biases, tied embeddings, one head for all queries."""
    for i, options in enumerate(
        (
            {"attention_bias": True, "mlp_bias": True, "num_key_value_heads": 1},
            {"tie_word_embeddings": True, "num_key_value_heads": 4},
        )
    ):
        folder = make_model("llama", tmp_path / str(i), **options)
        assert described(folder) == sizes_of(folder)
        for weights in ("fp32", "int4"):
            made = plan(folder, target="cpu", weights=weights, max_seq_len=None)
            with mock.patch.object(stored, "describe", side_effect=stored.InDoubtError):
                assert made == plan(folder, target="cpu", weights=weights, max_seq_len=None)


DOUBTS: dict[str, tuple[str, dict[str, Any], str]] = {
    "another architecture": ("phi3", {}, "architecture 'phi3' is none that its files alone"),
    "a window's rule": ("qwen2", {"use_sliding_window": True, "max_window_layers": None,
                                  "sliding_window": 8, "layer_types": None},
                        "does not say max_window_layers"),
    "layers of its own": ("llama", {"layer_types": ["full_attention"] * 2}, "has layer_types of"),
    "chunked layers": ("gemma2", {"layer_types": ["chunked_attention"] * 3}, "layers of chunked"),
    "both directions": ("gemma3_text", {"use_bidirectional_attention": True}, "has use_bidirect"),
    "a part of the head": ("llama", {"rope_parameters": {"partial_rotary_factor": 0.5}}, "rope"),
    "by length": ("llama", {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope"),
    "fewer layers": ("llama", {"num_hidden_layers": 1}, "it has model.layers.1"),
    "more layers": ("llama", {"num_hidden_layers": 3}, "it lacks model.layers.2"),
    "other heads": ("llama", {"num_key_value_heads": 4}, r"k_proj.weight is \[32, 64\], and its"),
    "another vocabulary": ("llama", {"vocab_size": 161}, r".weight is \[160, 64\], and its"),
    "a text": ("llama", {"head_dim": "16"}, "says head_dim '16'"),
    "experts of a token": ("gpt_oss", {"num_experts_per_tok": 9}, "num_experts_per_tok 9, and"),
    "not said": ("qwen3", {"num_key_value_heads": None}, "does not say num_key_value_heads"),
}  # fmt: skip


@pytest.mark.parametrize("case", DOUBTS)
def test_where_files_leave_a_doubt_transformers_is_asked(
    case: str, model_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    architecture, changes, why = DOUBTS[case]
    folder = configure(tmp_path / "model", model_folder(architecture), **changes)
    with pytest.raises(stored.InDoubtError, match=why):
        described(folder)


def test_plans_without_torch_are_those_with_it(model_folder: Callable[[str], Path]) -> None:
    """Of every family, packed or not, and no framework is imported."""
    folders = [model_folder(name) for name in OVERRIDES]
    for options in (("--target", "cuda:sm_90"), ("--weights", "int4")):
        command = [sys.executable, "-c", WITHOUT, *options, *map(str, folders)]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        target, weights = (options[1], None) if options[0] == "--target" else ("cpu", "int4")
        with mock.patch.object(stored, "describe", side_effect=stored.InDoubtError):
            sizes = {"memory": 1 << 30, "max_seq_len": None, "max_batch_size": DEFAULT_BATCH_SIZE}
            expected = [plan(each, target=target, weights=weights, **sizes) for each in folders]
        found = [json.loads(text) for text in re.findall(r"^{.*?^}", done.stdout, re.M | re.S)]
        assert found == [to_plain(each) for each in expected]


def test_without_torch_what_is_in_doubt_is_one_sentence(
    llama_8b: Path, model_folder: Callable[[str], Path]
) -> None:
    for folder, why in (
        (llama_8b, "it has no safetensors"),
        (model_folder("phi3"), "architecture 'phi3' is none that its files alone describe"),
    ):
        command = [sys.executable, "-c", WITHOUT, "--target", "cpu", str(folder)]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 2
        assert done.stderr.splitlines()[-1] == (
            f"kvgraph: torch: needed to plan {folder}, since {why}, not installed; "
            "pip install 'kvgraph[compile]'"
        )


def test_an_index_alone_says_how_large_the_weights_are(
    model_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    source = model_folder("llama")
    layout = read_layout(source / "model.safetensors")
    total = sum(at.nbytes for at in layout.values())
    shards = dict.fromkeys(layout, "a.safetensors")
    index = {"metadata": {"total_size": total}, "weight_map": shards}
    folder = configure(tmp_path / "model", source)
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    for dtype in ("float32", "bfloat16"):
        assert plan(folder, max_seq_len=None, dtype=dtype) == plan(
            source, max_seq_len=None, dtype=dtype
        )
    with pytest.raises(stored.InDoubtError, match="packed weights are counted by their"):
        described(folder)
    del shards["lm_head.weight"]
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(stored.InDoubtError, match=r"it lacks lm_head\.weight"):
        stored.describe(folder, read_config(folder), by_shape=False)


@pytest.mark.parametrize("architecture", OVERRIDES)
def test_what_is_planned_is_what_compile_makes(
    architecture: str, compiled: Compiled, model_folder: Callable[[str], Path]
) -> None:
    artifact = kvgraph.load(compiled(architecture))
    made = plan(
        model_folder(architecture), target="cpu", page_size=16, max_seq_len=None, memory=1 << 30
    )
    leaves = artifact.params().leaves
    assert made.bytes_per_page == {path: leaf.bytes_per_page for path, leaf in leaves.items()}
    assert made.cache_dtype == next(iter(leaves.values())).dtype
    manifest = artifact.manifest
    found = (manifest.model.architecture, manifest.model.max_seq_len, manifest.dtype)
    assert (made.architecture, made.max_seq_len, made.dtype) == found
    assert made.weights_dtype == manifest.weights
    # Biases that are all zero are stored once.
    assert made.weights == pytest.approx(held_bytes(artifact.folder), rel=0.02)


# -- weights


def held_bytes(artifact: Path) -> int:
    """Of weights.safetensors, and of what ONNX keeps in the graph: tensors of up to a KiB, which
    are 1.6 % of so small a model as tiny-llama in int4."""
    held = sum(at.nbytes for at in read_layout(artifact / "weights.safetensors").values())
    if (artifact / "model.onnx").exists():
        graph = onnx.load(artifact / "model.onnx", load_external_data=False).graph
        inline = [x for x in graph.initializer if x.data_location != onnx.TensorProto.EXTERNAL]
        held += sum(onnx.numpy_helper.to_array(x).nbytes for x in inline)
    return held


PACKED = ("bf16", "int8", "int4")


@pytest.mark.parametrize(
    ("backend", "weights"),
    [("onnx", "fp32"), *((backend, w) for backend in ("onnx", "torch") for w in PACKED)],
)
def test_planned_weights_are_what_an_artifact_holds(
    compiled: Compiled, backend: str, weights: str
) -> None:
    out = compiled("tiny-llama", backend, **({"weights": weights} if weights in PACKED else {}))
    made = plan(TINY_LLAMA, target="cpu", weights=weights, max_seq_len=None)
    assert made.weights == pytest.approx(held_bytes(out), rel=0.002)
    assert made.weights_dtype == kvgraph.load(out).manifest.weights == weights


def test_a_target_without_weights_asked_for_plans_its_default(tmp_path: Path) -> None:
    """ONNX on cpu computes in float32, so the pool is float32 too, whatever is stored."""
    half = make_model("llama", tmp_path / "half", dtype="bfloat16")
    for dtype, weights in ((None, "bf16"), ("float32", "fp32"), ("float16", "fp32")):
        made = plan(half, target="cpu", dtype=dtype, max_seq_len=None)
        manifest = kvgraph.compile(half, tmp_path / weights, dtype=dtype, force=True)
        assert made.weights_dtype == manifest.weights == weights
        assert made.dtype == manifest.dtype == "float32"
        assert made.cache_dtype == manifest.layout["dtype"]


def test_linear_layers_with_biases_and_odd_widths(tmp_path: Path) -> None:
    """Panels are padded to 16 columns and 64 inputs; q, k and v have float32 biases."""
    folder = make_model("qwen2", tmp_path / "odd", hidden_size=72, head_dim=18, num_hidden_layers=1)
    kvgraph.compile(folder, tmp_path / "a.kvg", weights="int4")
    made = plan(folder, target="cpu", weights="int4", max_seq_len=None)
    equal_norms = 2 * 72 * 4  # ONNX keeps one of three
    assert made.weights == pytest.approx(held_bytes(tmp_path / "a.kvg") + equal_norms, rel=0.001)


REFUSED: dict[str, dict[str, str]] = {
    "unknown": {"weights": "int2", "target": "cpu"},
    "on a GPU": {"weights": "fp32", "target": "cuda:sm_90"},
    "of bfloat16 activations": {"weights": "int4", "target": "cpu", "dtype": "bfloat16"},
}


@pytest.mark.parametrize("case", REFUSED)
def test_weights_are_refused_as_a_compile_refuses_them(
    case: str, llama_8b: Path, tmp_path: Path
) -> None:
    sentences = []
    for attempt in (
        lambda: plan(llama_8b, **REFUSED[case]),
        lambda: kvgraph.compile(llama_8b, tmp_path / "a", **REFUSED[case]),  # type: ignore[arg-type]
    ):
        with pytest.raises(UnsupportedError) as raised:
            attempt()
        sentences.append(str(raised.value))
    assert sentences[0] == sentences[1]


def test_sliding_layers_are_planned_for_their_windows(model_folder: Callable[[str], Path]) -> None:
    """gemma2 here: window 24 of 512 tokens, so with page 16 a request holds 4 of its 32 pages."""
    made = plan(
        model_folder("gemma2"), page_size=16, max_seq_len=512, max_batch_size=8, memory=64 << 20
    )
    assert made.pages == {"sliding": 8 * 4 + 2048 // 16, "full": 8 * 32}
    assert made.concurrent_requests == 8


@pytest.mark.parametrize(
    ("rope", "most"),
    [
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, 4 * 32768),
        ({"rope_scaling": {"type": "yarn", "factor": 2, ORIGINAL: 65536}}, 4 * 32768),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0, ORIGINAL: 8192}}, 32768),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, 2 * 32768),
    ],
)
def test_lengths_that_frequencies_stretch_to_are_planned(
    rope: dict[str, Any], most: int, tmp_path: Path
) -> None:
    """YaRN by the files alone, dynamic frequencies by transformers: as a compile takes them."""
    config = LLAMA_8B | {"max_position_embeddings": 32768, "num_hidden_layers": 1} | rope
    for given in [value for value in rope.values() if "rope_type" in value]:
        given.setdefault("rope_theta", 10000.0)
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert plan(tmp_path, max_seq_len=most).max_seq_len == most
    assert plan(tmp_path, max_seq_len=None).max_seq_len == 32768
    with pytest.raises(ParamsError, match=f"expected 1 to {most} from the model"):
        plan(tmp_path, max_seq_len=most + 1)


def test_lengths_beyond_the_model_are_refused(llama_8b: Path) -> None:
    for length in (0, 131073):
        message = rf"max_seq_len: expected 1 to 131072 from the model, got {length}"
        with pytest.raises(ParamsError, match=message):
            plan(llama_8b, max_seq_len=length)
