"""How many scales a head of a quantised pool has, where the user says its dtype alone."""

from __future__ import annotations

from pathlib import Path

import pytest

import kvgraph
from kvgraph.compiler.cache import LayerNeed, plan_cache, pool_types
from kvgraph.contract.devices import Device
from kvgraph.contract.params import KVCacheParams, KVCacheQuantization
from kvgraph.errors import ParamsError, UnsupportedError
from tests.support.artifacts import CHECKED
from tests.support.models import make_model


@pytest.mark.parametrize("cache_dtype", ["int8", "float8_e4m3fn"])
@pytest.mark.parametrize(
    ("head_dim", "v_head_dim", "granularity"),
    [
        (40, 40, 40),
        (128, 128, 128),
        (256, 256, 128),
        (160, 160, 32),
        (96, 64, 32),
        (192, 128, 64),
        (520, 520, 8),
        (576, 512, 64),
    ],
)
def test_blocks_that_divide_keys_and_values(
    head_dim: int, v_head_dim: int, granularity: int, cache_dtype: str
) -> None:
    dtype, quantization = pool_types("float32", cache_dtype)
    plan = plan_cache(
        [LayerNeed(2, head_dim, v_head_dim, None)],
        dtype=dtype,
        quantization=quantization,
        page_size=16,
        devices=[Device("cpu")],
    )
    assert isinstance(plan.params, KVCacheParams)
    assert plan.params.scale_granularity == granularity


def test_heads_that_no_block_divides() -> None:
    _, quantization = pool_types("float32", "int8")
    message = r"^cache dtype int8: expected heads of a multiple of 8 elements, got 130 of keys"
    with pytest.raises(UnsupportedError, match=message):
        plan_cache(
            [LayerNeed(2, 130, 130, None)],
            dtype="float32",
            quantization=quantization,
            page_size=16,
            devices=[Device("cpu")],
        )


def test_a_block_that_does_not_divide_values() -> None:
    message = r"^quantization.granularity: expected a divisor of v_head_dim 64, got 96$"
    with pytest.raises(ParamsError, match=message):
        KVCacheParams(
            dtype="float32",
            n_kv_heads=2,
            head_dim=96,
            v_head_dim=64,
            num_layers=1,
            page_size=16,
            quantization=KVCacheQuantization("int8"),
            devices=(Device("cpu"),),
        )


def test_a_head_of_an_odd_width(tmp_path: Path) -> None:
    model = make_model("llama", tmp_path / "model", head_dim=160)
    kvgraph.compile(model, tmp_path / "out.kvg", cache_dtype="int8")
    assert CHECKED in kvgraph.load(tmp_path / "out.kvg").manifest.notes
