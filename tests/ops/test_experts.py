"""kvgraph.experts against its NumPy reference, for every instruction set of this processor."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from itertools import permutations
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch.nn import functional

from kvgraph.compiler.packed_weights import Packed
from kvgraph.errors import KernelError
from kvgraph.ops import EXPERTS, native, torch_ops
from kvgraph.ops._experts import experts
from kvgraph.ops.packed import GELU, GELU_TANH, MOST_SUMMED, SILU
from tests.ops.test_linear import ISAS
from tests.support.isa import forced_isa
from tests.support.packed import pack_each

Array = npt.NDArray[Any]

BITS = [32, 16, 8, 4]
DEFAULTS = {a.name: a.default for a in EXPERTS.attributes}
GPT_OSS = {"alpha": 1.702, "limit": 0.5, "up_offset": 1.0}

# name: rows, inputs, inner, experts, active, attributes, bias
SHAPES: dict[str, tuple[int, int, int, int, int, dict[str, float], bool]] = {
    "one row": (1, 64, 32, 8, 2, {}, False),
    "ragged edges": (25, 100, 41, 5, 3, {"activation": SILU}, True),
    "more experts than rows": (3, 64, 48, 32, 1, {"activation": GELU}, False),
    "one expert has all rows": (420, 64, 16, 1, 1, {"activation": GELU_TANH}, False),
    "gpt_oss": (70, 96, 64, 4, 2, GPT_OSS, True),
}


def call_of(
    shape: str, bits: int, seed: int = 0, down_bits: int = 0
) -> tuple[list[Array | None], dict[str, float], list[tuple[list[Array], list[Array]]]]:
    """Operands and attributes of a call; each expert's gate, up and down, and their biases.

    `down_bits`: bits of the second layer, if they are others.
    """
    down_bits = down_bits or bits
    rows, inputs, inner, count, active, extra, has_bias = SHAPES[shape]
    random = np.random.default_rng(seed)

    def layer(columns: int, depth: int) -> tuple[Array, Array]:
        weight = random.standard_normal((columns, depth)) / np.sqrt(depth)
        return weight.astype(np.float32), random.standard_normal(columns).astype(np.float32)

    made = []
    for _ in range(count):
        layers = [layer(inner, inputs), layer(inner, inputs), layer(inputs, inner)]
        made.append(([w for w, _ in layers], [b for _, b in layers] if has_bias else []))
    up = pack_each([(w[:2], b[:2]) for w, b in made], bits)
    down = pack_each([(w[2:], b[2:]) for w, b in made], down_bits)
    x = random.standard_normal((rows, inputs)).astype(np.float32)
    chosen = np.stack([random.permutation(count)[:active] for _ in range(rows)]).astype(np.int32)
    weights = random.random((rows, active)).astype(np.float32)
    given: list[Array | None] = [x, chosen, weights, up.weight, down.weight]
    given += [*rest(up), *rest(down)]
    return given, {"inner_features": inner, "up_bits": bits, "down_bits": down_bits, **extra}, made


def rest(packed: Packed) -> list[Array | None]:
    return [packed.scales, packed.group_bytes, packed.bias]


def run(given: list[Array | None], attributes: dict[str, float]) -> Array:
    found: Array = native.run(EXPERTS, *given, **attributes)
    return found


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("isa", ISAS)
def test_is_the_reference(isa: str, bits: int, shape: str) -> None:
    require_reference(isa, bits, bits, shape)


@pytest.mark.parametrize("shape", ["ragged edges", "gpt_oss"])
@pytest.mark.parametrize(("bits", "down_bits"), list(permutations(BITS, 2)))
@pytest.mark.parametrize("isa", ISAS)
def test_each_layer_has_its_own_bits(isa: str, bits: int, down_bits: int, shape: str) -> None:
    require_reference(isa, bits, down_bits, shape)


def require_reference(isa: str, bits: int, down_bits: int, shape: str) -> None:
    given, attributes, _ = call_of(shape, bits, down_bits=down_bits)
    expected = experts(*given, **attributes)  # type: ignore[arg-type]
    with forced_isa(isa):
        found = run(given, attributes)
    # What the inner layer rounds to bfloat16 or int8 may fall on either side.
    step = {32: 0.0, 16: 2**-8, 8: 1 / 127, 4: 1 / 127}[down_bits]
    scale = np.abs(expected).max()
    assert np.abs(found - expected).max() <= (2e-5 + step / 2) * scale
    assert np.abs(found - expected).mean() <= (2e-6 + step / 100) * scale


@pytest.mark.parametrize("shape", SHAPES)
def test_in_float32_is_what_torch_computes(shape: str) -> None:
    given, attributes, made = call_of(shape, 32)
    x, chosen, weights = (torch.from_numpy(array) for array in given[:3])  # type: ignore[arg-type]
    expected = torch.zeros_like(x)
    alpha, limit = attributes.get("alpha", 1.0), attributes.get("limit") or torch.inf
    for expert, (layers, biases) in enumerate(made):
        gate, up, down = (torch.from_numpy(w) for w in layers)
        own = [torch.from_numpy(b) for b in biases] or [None] * 3
        g = functional.linear(x, gate, own[0]).clamp(max=limit)
        u = functional.linear(x, up, own[1]).clamp(-limit, limit) + attributes.get("up_offset", 0)
        kind = attributes.get("activation", SILU)
        how = "none" if kind == GELU else "tanh"
        a = g * torch.sigmoid(alpha * g) if kind == SILU else functional.gelu(g, approximate=how)
        out = functional.linear(a * u, down, own[2])
        expected += out * (weights * (chosen == expert)).sum(1, keepdim=True)
    np.testing.assert_allclose(run(given, attributes), expected, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("isa", ISAS)
def test_a_row_is_the_same_bits_beside_any_others(isa: str, bits: int) -> None:
    if isa == "amx" and bits == 16:
        pytest.skip("its tiles add bfloat16 in another order")
    given, attributes, _ = call_of("gpt_oss", bits)
    x, chosen, weights = given[:3]
    assert x is not None
    assert chosen is not None
    assert weights is not None
    with forced_isa(isa) as library:
        library.dll.kvg_cpu_set_num_threads(1)
        expected = run(given, attributes)
        library.dll.kvg_cpu_set_num_threads(2)
        np.testing.assert_array_equal(run(given, attributes), expected)
        for some in (slice(0, 1), slice(3, 20), slice(None, None, -1)):
            part = [np.ascontiguousarray(a[some]) for a in (x, chosen, weights)]
            np.testing.assert_array_equal(run([*part, *given[3:]], attributes), expected[some])


def test_blocks_of_a_long_step_give_what_each_gives_alone() -> None:
    """32,000 slots of 2.6 KiB and more do not fit into one block."""
    rows, inputs, inner, count = 16000, 512, 16, 2
    random = np.random.default_rng(0)
    draw = lambda *dims: (random.standard_normal(dims) / 16).astype(np.float32)  # noqa: E731
    made = [(draw(inner, inputs), draw(inner, inputs), draw(inputs, inner)) for _ in range(count)]
    up = pack_each([(w[:2], ()) for w in made], 8)
    down = pack_each([(w[2:], ()) for w in made], 8)
    x = draw(rows, inputs)
    chosen = random.integers(0, count, (rows, 2)).astype(np.int32)
    weights = random.random((rows, 2)).astype(np.float32)
    packed = [up.weight, down.weight, *rest(up), *rest(down)]
    attributes = {"inner_features": inner, "up_bits": 8, "down_bits": 8}
    whole = run([x, chosen, weights, *packed], attributes)
    for begin in range(0, rows, 4000):
        part = [array[begin : begin + 4000] for array in (x, chosen, weights)]
        found = run([*part, *packed], attributes)
        np.testing.assert_array_equal(found, whole[begin : begin + 4000])


@pytest.mark.parametrize("bits", BITS)
def test_a_row_with_a_nan_is_nan_and_others_are_not(bits: int) -> None:
    given, attributes, _ = call_of("ragged edges", bits)
    clean = run(given, attributes)
    assert given[0] is not None
    given[0][3, 5] = np.nan
    dirty = run(given, attributes)
    assert np.isnan(dirty[3]).all()
    others = [i for i in range(len(clean)) if i != 3]
    np.testing.assert_array_equal(dirty[others], clean[others])


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("isa", ISAS)
def test_ranks_that_have_other_experts_add_up(isa: str, bits: int) -> None:
    """Each leaves out the turns of the other's experts, whatever their weights are."""
    given, attributes, _ = call_of("ragged edges", bits)
    x, chosen, weights = given[:3]
    assert x is not None
    assert chosen is not None
    assert weights is not None
    with forced_isa(isa):
        whole, parts = run(given, attributes), []
        for own in (chosen < 2, chosen >= 2):
            ids = np.where(own, chosen, -1).astype(np.int32)
            poisoned = np.where(own, weights, np.nan).astype(np.float32)
            part = [x, ids, poisoned, *given[3:]]
            parts.append(run(part, attributes))
            np.testing.assert_allclose(
                parts[-1],
                experts(*part, **attributes),
                rtol=0.02,
                atol=0.05,  # type: ignore[arg-type]
            )
            assert not parts[-1][~own.any(1)].any()
    np.testing.assert_allclose(parts[0] + parts[1], whole, rtol=1e-5, atol=1e-5)
    nobody = [x, np.full_like(chosen, -1), weights, *given[3:]]
    assert not run(nobody, attributes).any()


def test_no_row_has_an_expert_in_a_threads_first_call() -> None:
    """As on a rank that has none of a step's experts: nothing is left of calls before."""
    given, attributes, _ = call_of("one row", 32)
    nobody = [given[0], np.full_like(given[1], -1), *given[2:]]  # type: ignore[arg-type]
    with ThreadPoolExecutor(1) as fresh:
        assert not fresh.submit(run, nobody, attributes).result().any()


@pytest.mark.parametrize("bits", BITS)
def test_a_residual_is_added_to_the_sum(bits: int) -> None:
    if native.isa() == "amx" and bits == 16:
        pytest.skip("its tiles add bfloat16 in another order")
    given, attributes, _ = call_of("ragged edges", bits)
    residual = np.random.default_rng(1).standard_normal((25, 100)).astype(np.float32)
    without = run(given, attributes)
    np.testing.assert_array_equal(run([*given, residual], attributes), without + residual)
    blocks = [np.tile(array, (800, 1)) for array in (*given[:3], residual)]  # type: ignore[arg-type]
    many = run([*blocks[:3], *given[3:], blocks[3]], attributes)
    np.testing.assert_array_equal(many, np.tile(without + residual, (800, 1)))
    none = [given[0], *(array[:, :0] for array in given[1:3])]  # type: ignore[index]
    np.testing.assert_array_equal(run([*none, *given[3:], residual], attributes), residual)


def test_no_rows_and_no_experts_of_a_row() -> None:
    given, attributes, _ = call_of("one row", 8)
    none = [array[:0] for array in given[:3]]  # type: ignore[index]
    assert run([*none, *given[3:]], attributes).shape == (0, 64)
    no_experts = [given[0], *(array[:, :0] for array in given[1:3])]  # type: ignore[index]
    assert not run([*no_experts, *given[3:]], attributes).any()


REFUSALS: dict[str, tuple[dict[int, Any], dict[str, float], str]] = {
    "an expert that is not there": (
        {1: np.array([[1, 8]], np.int32)},
        {},
        "indices: expected one of the 8 experts of up, or -1, got 8",
    ),
    "an expert below none": (
        {1: np.array([[1, -2]], np.int32)},
        {},
        "indices: expected one of the 8 experts of up, or -1, got -2",
    ),
    "bits of up": ({}, {"up_bits": 5}, "up_bits: expected 32, 16, 8 or 4, got 5"),
    "bits of down": ({}, {"down_bits": 5}, "down_bits: expected 32, 16, 8 or 4, got 5"),
    "dtype of up": ({}, {"up_bits": 16}, "up: expected bfloat16 for 16 bits, got int8"),
    "dtype of down": ({}, {"down_bits": 16}, "down: expected bfloat16 for 16 bits, got int8"),
    "codes of down": (
        {},
        {"down_codes": 1},
        "down_codes: expected 0 for 8 bits without groups, got 1",
    ),
    "no scales": ({5: None}, {}, "up_scales: expected some for 8 bits, got none"),
    "scales of another expert count": (
        {8: np.zeros((7, 4, 2, 16), np.float32)},
        {},
        "down_scales: dim num_experts: expected 8 as up has it, got 7",
    ),
    "a group that is too large": (
        {},
        {"up_group": 2**62, "up_codes": 3},
        "up_group: expected at most 1099511627776, got 4611686018427387904",
    ),
    "too many inner features": (
        {},
        {"inner_features": 2**62},
        "inner_features: expected at most 1099511627776, got 4611686018427387904",
    ),
    "inner features": (
        {},
        {"inner_features": 65},
        "down: dim num_down_lines: expected 32 for 65 inner_features, got 16",
    ),
    "a residual of other rows": (
        {11: np.zeros((2, 64), np.float32)},
        {},
        "residual: dim rows: expected 1 as x has it, got 2",
    ),
    "panels": (
        {},
        {"inner_features": 33},
        "up: dim num_up_panels: expected 6 for inner_features 33, got 4",
    ),
    "activation": ({}, {"activation": 3}, "activation: expected 0, 1 or 2, got 3"),
    "alpha": ({}, {"alpha": np.inf}, "alpha: expected a finite number in float32, got inf"),
    "limit": ({}, {"limit": -1.0}, "limit: expected at least 0, and finite in float32, got -1"),
    "limit that is lost": (
        {},
        {"limit": 1e-46},
        "limit: expected 0, or a number that is not 0 in float32, got 1e-46",
    ),
    "offset": (
        {},
        {"up_offset": np.nan},
        "up_offset: expected a finite number in float32, got nan",
    ),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_refusals_name_operand_and_both_values(case: str) -> None:
    """The kernel and the fake, which a trace runs, in one sentence."""
    changed, other, sentence = REFUSALS[case]
    given, attributes, _ = call_of("one row", 8)
    given.append(None)  # the residual
    for index, value in changed.items():
        given[index] = value
    with pytest.raises(KernelError) as refusal:
        run(given, attributes | other)
    assert str(refusal.value) == f"experts: {sentence}"
    if "indices" in sentence:  # values are not known before a step
        return
    tensors = [None if array is None else torch.from_numpy(array) for array in given]
    with pytest.raises(KernelError) as refusal:
        torch_ops.fake(EXPERTS)(*tensors, **DEFAULTS | attributes | other)
    assert str(refusal.value) == f"experts: {sentence}"


@pytest.mark.parametrize(
    ("inputs", "inner", "name"),
    [(MOST_SUMMED + 1, 1, "x: dim in_features"), (1, MOST_SUMMED + 1, "inner_features")],
)
@pytest.mark.parametrize("bits", [8, 4])
def test_more_inputs_than_int32_sums_are_refused(
    inputs: int, inner: int, name: str, bits: int
) -> None:
    wide, narrow = np.ones((inner, inputs), np.float32), np.ones((inputs, inner), np.float32)
    up, down = pack_each([([wide, wide], [])], bits), pack_each([([narrow], [])], bits)
    given: list[Array | None] = [np.ones((1, inputs), np.float32), np.zeros((1, 1), np.int32)]
    given += [np.ones((1, 1), np.float32), up.weight, down.weight, *rest(up), *rest(down), None]
    attributes = {"inner_features": inner, "up_bits": bits, "down_bits": bits}
    expected = (
        f"experts: {name}: expected at most {MOST_SUMMED} for {bits} bits without groups, got "
        f"{MOST_SUMMED + 1}"
    )
    with pytest.raises(KernelError) as refusal:
        run(given, attributes)
    assert str(refusal.value) == expected
    tensors = [None if array is None else torch.from_numpy(array) for array in given]
    with pytest.raises(KernelError) as refusal:
        torch_ops.fake(EXPERTS)(*tensors, **DEFAULTS | attributes)
    assert str(refusal.value) == expected
