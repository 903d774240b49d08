"""Extents whose sizes pass 64 bits and addresses between two elements are refused by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pytest

from kvgraph.errors import KernelError
from kvgraph.ops import ALL_GATHER, EXPERTS, LINEAR, PAGED_ATTENTION, STORE_KV, native
from kvgraph.ops.spec import OpSpec

MEMORY = np.zeros(8192, np.uint8)
AT = MEMORY.ctypes.data + -MEMORY.ctypes.data % 64
MOST = 2**40

Shapes = Mapping[str, Sequence[int]]


def refusal(
    spec: OpSpec,
    shapes: Shapes,
    attributes: Mapping[str, float],
    dtypes: Mapping[str, str] = {},
    addresses: Mapping[str, int] = {},
) -> str:
    """The sentence for operands of these shapes; the others are left out."""
    operands = [
        (addresses.get(operand.name, AT), dtypes.get(operand.name, operand.dtypes[0]), tuple(shape))
        if (shape := shapes.get(operand.name)) is not None
        else None
        for operand in (*spec.inputs, *spec.outputs)
    ]
    with pytest.raises(KernelError) as error:
        native.call(spec, operands, attributes)
    return str(error.value)


def linear(rows: int = 1, inputs: int = 64, columns: int = 16, panels: int = 1) -> Shapes:
    return {"x": (rows, inputs), "weight": (panels, 64, 16), "out": (rows, columns)}


def pool(slots: int = 0, layers: int = 1, page_size: int = 4) -> Shapes:
    return {
        "kv_blocks": (slots, 2, layers, page_size, 1, 8),
        "k": (0, 1, 8),
        "v": (0, 1, 8),
        "input_row_offsets": (1,),
        "cache_lengths": (0,),
        "lookup_table": (0, 1),
    }


FLOAT32 = {"out_features": 16, "bits": 32}
ATTENDS = {"layer": 0, "scale": 1.0}
SMALL_EXPERTS = {"inner_features": 16, "up_bits": 32, "down_bits": 32}
MIXTURE: Shapes = {
    "x": (1, 64),
    "indices": (1, 2**62),
    "weights": (1, 2**62),
    "up": (1, 2, 64, 16),
    "down": (1, 4, 64, 16),
    "out": (1, 64),
}


@pytest.mark.parametrize(
    ("spec", "shapes", "attributes", "sentence"),
    [
        (LINEAR, linear(rows=2**62), FLOAT32, f"x: dim rows: expected at most {MOST}, got {2**62}"),
        (LINEAR, linear(rows=0, inputs=2**63 - 1), FLOAT32,
         f"x: dim in_features: expected at most {MOST}, got {2**63 - 1}"),
        (LINEAR, linear(rows=0, columns=2**63 - 1), {**FLOAT32, "out_features": 2**63 - 1},
         f"out: dim out_features: expected at most {MOST}, got {2**63 - 1}"),
        (LINEAR, linear(rows=2**40, inputs=512), FLOAT32,
         "x: dim in_features: expected at most 256, got 512"),
        (LINEAR, linear(panels=2**58), FLOAT32,
         f"weight: dim num_panels: expected at most {MOST}, got {2**58}"),
        (EXPERTS, MIXTURE, SMALL_EXPERTS,
         f"indices: dim num_active: expected at most {MOST}, got {2**62}"),
        (EXPERTS, MIXTURE | {"indices": (1, 2**40), "weights": (1, 2**40), "x": (1, 2**16),
                             "up": (1, 2, 2**16, 16), "down": (1, 2**12, 64, 16),
                             "out": (1, 2**16)},
         SMALL_EXPERTS,
         f"indices: dim num_active: expected at most {2**32}, got {2**40}"),
        (STORE_KV, pool(page_size=2**63 - 1), {"layer": 0},
         f"kv_blocks: dim page_size: expected at most {MOST}, got {2**63 - 1}"),
        (STORE_KV, pool(layers=2**63 - 1), {"layer": 0},
         f"kv_blocks: dim num_layers: expected at most {MOST}, got {2**63 - 1}"),
        (STORE_KV, pool(layers=2**40, page_size=2**40), {"layer": 0},
         "kv_blocks: dim page_size: expected at most 128, got 1099511627776"),
        (ALL_GATHER, {"x": (1, 4), "out": (1, 4)}, {"ranks": 2**62, "out_width": 4},
         "ranks: expected 1 to 64, got 4611686018427387904"),
    ],
)  # fmt: skip
def test_of_extents(
    spec: OpSpec, shapes: Shapes, attributes: Mapping[str, float], sentence: str
) -> None:
    assert refusal(spec, shapes, attributes, {"weight": "float32"}) == f"{spec.name}: {sentence}"


@pytest.mark.parametrize(
    ("name", "dtype", "bytes_off"),
    [
        ("x", "float32", 1),
        ("weight", "float32", 2),
        ("weight", "bfloat16", 1),
        ("out", "float32", 1),
    ],
)
def test_of_addresses(name: str, dtype: str, bytes_off: int) -> None:
    shapes = {**linear(), "weight": (1, 64, 16) if dtype == "float32" else (1, 32, 32)}
    bits = 32 if dtype == "float32" else 16
    weight = {"weight": dtype if name == "weight" else "float32"}
    address = AT + bytes_off
    size = 2 if dtype == "bfloat16" else 4
    said = refusal(LINEAR, shapes, {"out_features": 16, "bits": bits}, weight, {name: address})
    assert said == (
        f"linear: {name}: expected an address that is a multiple of {size}, got 0x{address:x}"
    )


def test_of_a_query_and_of_what_the_sampler_reads() -> None:
    shapes = {**pool(1), "q": (1, 1, 8), "max_lengths": (1, 2), "out": (1, 1, 8)}
    said = refusal(PAGED_ATTENTION, shapes, ATTENDS, addresses={"q": AT + 2})
    assert (
        said == f"paged_attention: q: expected an address that is a multiple of 4, got 0x{AT + 2:x}"
    )
    message = native.MESSAGE()
    entry = native.library().dll.kvg_cpu_logprobs
    assert entry(AT + 2, 1, 8, AT, 1, AT, message, native.MESSAGE_BYTES) != 0
    assert message.value.decode() == (
        f"logprobs: logits: expected an address that is a multiple of 4, got 0x{AT + 2:x}"
    )


def test_of_nothing_an_address_may_be_any() -> None:
    shapes = linear(rows=0)
    operands = [
        (AT + (name != "weight"), "float32", tuple(shapes[name])) if name in shapes else None
        for name in (operand.name for operand in (*LINEAR.inputs, *LINEAR.outputs))
    ]
    native.call(LINEAR, operands, FLOAT32)
