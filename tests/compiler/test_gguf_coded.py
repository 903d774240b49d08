"""GGUF: blocks that are kept as they are stored, against what the gguf package reads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

import kvgraph
from kvgraph.compiler.frontends.stored_forms import GGUF_BLOCKS
from kvgraph.compiler.quantized.gguf_coded import CODED
from kvgraph.errors import ModelError
from kvgraph.ops.packed import EIGHTHS, LEVELS
from tests.compiler.conftest import EXPERTS
from tests.compiler.test_gguf import WIDE
from tests.compiler.test_stored_weights import nodes, weights_of
from tests.support import gguf_files, quantized
from tests.support.models import make_model

Array = np.ndarray[Any, Any]

KINDS = ["Q4_1", "Q4_K"]
"""Types with minima."""
SIZES = {"Q4_0": 18, "Q8_0": 34, "MXFP4": 17, "IQ4_NL": 18, "IQ4_XS": 136, "Q4_1": 20, "Q4_K": 144}
"""Bytes of a block."""


def blocks(kind: str, groups: int, seed: int = 0) -> Array:
    """A row of random numbers, as a quantiser writes it."""
    random = np.random.default_rng(seed)
    if kind == "Q4_1":
        values = random.standard_normal((1, groups * 32)).astype(np.float32)
        return np.asarray(gguf.quantize(values, gguf.GGMLQuantizationType.Q4_1))
    made = random.integers(0, 256, (1, groups // 8, 144)).astype(np.uint8)
    made[..., 4:8] = 32 + made[..., 4:8] % 32  # scales, and minima of 0 to 15 scales
    made[..., 8:12] = made[..., 8:12] % 64
    made[..., 12:16] = made[..., 12:16] // 16 * 16 + 12
    units = np.array([0.01, 0.05], "<f2").view(np.uint8)
    made[..., :4] = units
    return made.reshape(1, -1)


def exact(kind: str, data: Array) -> Array:
    return gguf.dequantize(data, gguf.GGMLQuantizationType[kind]).reshape(-1, 32)


def kept(kind: str, data: Array) -> tuple[Array, Array]:
    """Numbers `[groups, 32]` and scales."""
    coded = CODED[kind]("w", data, 0)
    assert coded.offsets is not None
    numbers = LEVELS[EIGHTHS][coded.numbers.numpy()].reshape(-1, 32)
    scales, offsets = (each.numpy().reshape(-1, 1) for each in (coded.scales, coded.offsets))
    return (numbers + offsets.astype(np.float32) / 8) * scales, scales


@pytest.mark.parametrize("kind", KINDS)
def test_a_minimum_is_rounded_to_an_eighth_of_the_scale(kind: str) -> None:
    data = blocks(kind, 64)
    found, scales = kept(kind, data)
    expected = exact(kind, data)
    assert (np.abs(found - expected) <= 1.001 * np.abs(scales) / 16).all()
    own = np.sort(np.unique(np.round(np.diff(np.sort(expected, -1)) / scales, 3)))
    assert np.array_equal(own, np.round(own)), "they are whole multiples of the scale apart"


@pytest.mark.parametrize("kind", [kind for kind in SIZES if kind not in KINDS])
def test_other_numbers_are_kept(kind: str) -> None:
    """Of several rows, with every byte in them."""
    random = np.random.default_rng(1)
    data = random.integers(0, 256, (2, 3, 40, SIZES[kind])).astype(np.uint8)
    if kind == "MXFP4":
        data[..., 0] = random.integers(100, 140, data.shape[:-1])
    else:
        data[..., :2] = np.array([0.01], "<f2").view(np.uint8)
    rows = data.reshape(2, 3, -1)
    coded = CODED[kind]("w", rows, 0)
    form = GGUF_BLOCKS[kind]
    numbers = coded.numbers.numpy()
    scales = coded.scales.numpy()
    if kind == "MXFP4":
        scales = np.ldexp(1.0, scales.astype(np.int64) - 127)
    levels = numbers if form.bits == 8 else LEVELS[form.codes][numbers]
    found = levels.astype(np.float32) * scales.repeat(form.group, -1).astype(np.float32)
    expected = gguf.dequantize(rows, gguf.GGMLQuantizationType[kind])
    assert np.array_equal(found, expected)


ODD: dict[str, tuple[float, float]] = {
    "far below zero": (0.01, 2.0),
    "far above zero": (0.01, -2.0),
    "all equal": (0.0, 0.7),
    "zeros": (0.0, 0.0),
    "a scale below zero": (-0.02, 0.1),
}
"""Scale and minimum of a group."""


@pytest.mark.parametrize("case", ODD)
def test_groups_whose_offset_does_not_fit_a_byte_are_rounded(case: str) -> None:
    scale, minimum = ODD[case]
    data = blocks("Q4_1", 2)
    data[:, :4] = np.array([scale, -minimum], "<f2").view(np.uint8)
    (found, other), _ = kept("Q4_1", data)
    expected, same = exact("Q4_1", data)
    reach = max(expected.max(), 0) - min(expected.min(), 0)
    assert np.abs(found - expected).max() <= 0.57 / 15 * reach + 1e-7
    assert np.abs(other - same).max() <= np.ptp(same) / 15 / 15


@pytest.mark.parametrize("at", [0, 1])
@pytest.mark.parametrize("kind", KINDS)
def test_units_that_are_not_finite_are_refused(kind: str, at: int) -> None:
    data = blocks(kind, 64)
    data.reshape(-1, SIZES[kind])[1].view("<f2")[at] = np.inf
    said = r"w\[3\]: block 1: expected a finite scale, got inf"
    with pytest.raises(ModelError, match=f"{said}{quantized.INSTEAD}$"):
        CODED[kind]("w", data, 3)


MINIMA = "weights: minima of 8 stored layers are rounded to an eighth of their scale"


@pytest.mark.parametrize("kind", [*KINDS, "IQ4_NL", "IQ4_XS"])
def test_a_file_runs_as_it_is_stored(kind: str, tmp_path: Path) -> None:
    """Every linear layer has the file's numbers; nothing is rounded to int4. Compile's own check
    runs it."""
    folder = make_model("llama", tmp_path / "model", num_hidden_layers=1, **WIDE)
    path = gguf_files.make(folder, tmp_path / "model.gguf", kind)
    manifest = kvgraph.compile(path, tmp_path / "a", page_size=16)
    assert manifest.weights == "stored"
    rounded = [note for note in manifest.notes if "rounded" in note]
    assert rounded == [MINIMA] * (kind in KINDS)
    found = [node for node in nodes(tmp_path / "a") if node[1]["codes"] == GGUF_BLOCKS[kind].codes]
    tensors = {
        tensor.name: gguf.dequantize(tensor.data, tensor.tensor_type)
        for tensor in gguf.GGUFReader(path).tensors
        if tensor.tensor_type.name == kind and tensor.name != "token_embd.weight"
    }
    rows = sum(len(each) for each in tensors.values())
    assert sum(len(weights_of(node)) for node in found) >= rows
    down = tensors["blk.0.ffn_down.weight"]
    same = [weights_of(node) for node in found if weights_of(node).shape == down.shape]
    errors = [np.sqrt(np.square(each - down).mean() / np.square(down).mean()) for each in same]
    assert min(errors) < (0.03 if kind in KINDS else 1e-6)


def test_minima_of_layers_that_are_rounded_to_int8_are_not_counted(tmp_path: Path) -> None:
    """Gate has minima, but is one product with up, which has none."""
    folder = make_model("llama", tmp_path / "model", num_hidden_layers=1, **WIDE)
    path = gguf_files.make(folder, tmp_path / "model.gguf", "Q4_1", kinds={"ffn_up": "Q8_0"})
    manifest = kvgraph.compile(path, tmp_path / "a", page_size=16, check=False)
    assert MINIMA.replace("8", "6", 1) in manifest.notes


@pytest.mark.parametrize("kind", ["Q4_1", "Q4_K", "IQ4_NL"])
def test_gpus_have_kernels_of_minima_but_not_of_levels(kind: str, tmp_path: Path) -> None:
    """Compile's own check runs them."""
    folder = make_model("llama", tmp_path / "model", num_hidden_layers=1, **WIDE)
    path = gguf_files.make(folder, tmp_path / "model.gguf", kind)
    manifest = kvgraph.compile(
        path, tmp_path / "a", target="cuda:sm_80", dtype="bfloat16", page_size=16
    )
    assert any("are rounded to int4" in note for note in manifest.notes) == (kind == "IQ4_NL")


@pytest.mark.parametrize(
    ("gate", "up", "bits", "said"),
    [
        ("Q6_K", "Q3_K", 8, "rounded to int8"),
        ("Q5_K", "Q4_K", 8, "rounded to int8"),
        ("F16", "Q4_0", 16, "rounded to bf16"),
        ("MXFP4", "Q4_0", 8, "rounded to int8"),
    ],
)
def test_gate_and_up_of_other_types_have_the_bits_of_the_larger_one(
    gate: str, up: str, bits: int, said: str, tmp_path: Path
) -> None:
    sizes = {"hidden_size": 256, "head_dim": 64, "moe_intermediate_size": 256}
    folder = make_model("qwen3_moe", tmp_path / "m", num_hidden_layers=1, **EXPERTS | sizes)
    kinds = {"ffn_gate_exps": gate, "ffn_up_exps": up}
    path = gguf_files.make(folder, tmp_path / "model.gguf", "Q8_0", kinds=kinds)
    manifest = kvgraph.compile(path, tmp_path / "a", page_size=16, check=False)
    assert [node[1]["bits"] for node in nodes(tmp_path / "a") if node[0] == "experts"] == [bits, 8]
    assert any(said in note for note in manifest.notes)
