"""Cache parameters: figures, shards, and every contradiction by its field and both values."""

from __future__ import annotations

from collections.abc import Callable
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest

from kvgraph import Device, KVCacheParams, KVCacheQuantization, virtual_devices
from kvgraph.contract.shards import shards_of
from kvgraph.contract.trees import MultiKVCacheParams, params_from_layout
from kvgraph.errors import ParamsError

LLAMA_8B: dict[str, Any] = {"dtype": "bfloat16", "n_kv_heads": 8, "head_dim": 128, "num_layers": 32}


def test_llama_8b_page_is_16_mib() -> None:
    assert KVCacheParams(**LLAMA_8B).bytes_per_page == 16_777_216


def test_bytes_per_page_is_a_replicas_figure() -> None:
    devices = tuple(virtual_devices("cuda:sm_90", 4))
    sharded = KVCacheParams(**LLAMA_8B, devices=devices, data_parallel_degree=2)
    assert (sharded.n_shards, sharded.n_kv_heads_per_device) == (2, 4)
    assert sharded.bytes_per_page == 16_777_216


def test_quantised_page_counts_its_scales() -> None:
    quantised = KVCacheParams(**LLAMA_8B, quantization=KVCacheQuantization("int8"))
    elements = 2 * 32 * 128 * 8 * 128
    assert quantised.bytes_per_page == elements + elements // 128 * 4
    assert quantised.get_symbolic_inputs()[0].kv_scales.shape[-1] == 1  # type: ignore[union-attr]


def test_heads_are_replicated_where_allowed() -> None:
    devices = tuple(virtual_devices("cuda:sm_90", 16))
    params = KVCacheParams(**LLAMA_8B, devices=devices, allow_kv_head_replication=True)
    assert params.n_kv_heads_per_device == 1


CPUS = tuple(Device(f"cuda:{i}") for i in range(3))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"dtype": "float64"}, r"dtype: expected one of .*, got 'float64'"),
        ({"head_dim": 0}, "head_dim: expected >= 1, got 0"),
        ({"page_size": 0}, "page_size: expected >= 1, got 0"),
        ({"window_size": 0}, "window_size: expected >= 1 or None, got 0"),
        ({"v_head_dim": 129}, "v_head_dim: expected <= head_dim 128, got 129"),
        ({"cache_strategy": "foo"}, r"cache_strategy: expected one of \['paged', .*got 'foo'"),
        (
            {"cache_strategy": "padded", "quantization": KVCacheQuantization("int8")},
            "quantization: expected None for a padded cache, got int8",
        ),
        ({"layout": "hnd"}, "layout: expected 'nhd', got 'hnd'"),
        ({"data_parallel_degree": 0}, "data_parallel_degree: expected >= 1, got 0"),
        (
            {"data_parallel_degree": 2},
            "devices: expected at least data_parallel_degree=2, got 1",
        ),
        (
            {"devices": CPUS, "data_parallel_degree": 2},
            "devices: expected a multiple of data_parallel_degree=2, got 3",
        ),
        ({"devices": CPUS}, "n_kv_heads: expected a multiple of the 3 shards .*, got 8"),
        ({"page_size": 16.5}, "page_size: expected an integer, got float 16.5"),
        ({"n_kv_heads": "8"}, "n_kv_heads: expected an integer, got str '8'"),
        ({"head_dim": np.array([1, 2])}, "head_dim: expected an integer, got ndarray array"),
        ({"window_size": True}, "window_size: expected an integer, got bool True"),
        ({"devices": ("cpu",)}, "devices: expected Device, got str 'cpu'"),
        ({"devices": (None,)}, "devices: expected Device, got NoneType None"),
        ({"devices": Device("cpu")}, "devices: expected a sequence of Devices, got Device "),
        ({"is_mla": "no"}, "is_mla: expected True or False, got str 'no'"),
        ({"enable_prefix_caching": 1}, "enable_prefix_caching: expected True or False, got int 1"),
        ({"allow_kv_head_replication": None}, "allow_kv_head_replication: expected True or False"),
        ({"quantization": "int8"}, "quantization: expected KVCacheQuantization, got str 'int8'"),
        ({"hash_seed": "a" * 32}, "hash_seed: expected bytes, got str"),
        ({"hash_seed": b"short"}, "hash_seed: expected 32 bytes, got 5"),
        ({"hash_algorithm": "md5"}, "hash_algorithm: expected 'sha256', got 'md5'"),
        (
            {"quantization": KVCacheQuantization("int8", granularity=48)},
            "granularity: expected a divisor of head_dim 128, got 48",
        ),
    ],
)
def test_contradictions(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ParamsError, match=message) as caught:
        KVCacheParams(**LLAMA_8B | change)
    assert isinstance(caught.value, ValueError)


def test_numpy_values_become_pythons() -> None:
    params = KVCacheParams(
        **LLAMA_8B | {"page_size": np.int64(64), "window_size": np.int32(9), "is_mla": np.True_}
    )
    assert type(params.page_size) is type(params.window_size) is int
    assert params.is_mla is True
    granularity: Any = np.int64(16)
    assert type(KVCacheQuantization("int8", granularity=granularity).granularity) is int


@pytest.mark.parametrize(
    ("granularity", "message"),
    [
        (16.0, "an integer >= 1, got float 16.0"),
        (True, "an integer >= 1, got bool True"),
        ("16", "an integer >= 1, got str '16'"),
        (None, "an integer >= 1, got NoneType None"),
        (0, ">= 1, got 0"),
    ],
)
def test_a_granularity_is_a_whole_number(granularity: Any, message: str) -> None:
    with pytest.raises(ParamsError, match=f"^quantization.granularity: expected {message}$"):
        KVCacheQuantization("int8", granularity=granularity)


@pytest.mark.parametrize("tree", [False, True])
def test_one_device_is_no_sequence(tree: bool) -> None:
    one: Any = Device("cpu")
    params = KVCacheParams(**LLAMA_8B)
    own = MultiKVCacheParams.from_params({"a": params}) if tree else params
    with pytest.raises(ParamsError, match=r"^devices: expected a sequence of Devices, got Device "):
        own.get_symbolic_inputs(one)


def test_scales_are_float32() -> None:
    with pytest.raises(ParamsError, match="scale_dtype: expected 'float32', got 'float16'"):
        KVCacheQuantization("int8", scale_dtype="float16")


def test_layout_survives_a_manifest() -> None:
    params = KVCacheParams(**LLAMA_8B, quantization=KVCacheQuantization("int8"), window_size=64)
    layout = params.layout_dict()
    again = KVCacheParams.from_layout(layout, devices=params.devices)
    assert again == params


@pytest.mark.parametrize(
    ("degree", "message"),
    [(0, ">= 1, got 0"), ("2", "an integer >= 1, got str '2'"), (None, "an integer >= 1, got N")],
)
def test_a_layout_for_no_number_of_replicas(degree: Any, message: str) -> None:
    layout = KVCacheParams(**LLAMA_8B).layout_dict()
    with pytest.raises(ParamsError, match=f"^data_parallel_degree: expected {message}"):
        KVCacheParams.from_layout(layout, data_parallel_degree=degree)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ([KVCacheParams(**LLAMA_8B)], "params: expected caches by name, got list "),
        (None, "params: expected caches by name, got NoneType None"),
        ({1: KVCacheParams(**LLAMA_8B)}, "cache name: expected an identifier .*, got 1"),
        ({"a": 5}, "cache 'a': expected KVCacheParams, got int 5"),
    ],
)
def test_what_is_no_tree(params: Any, message: str) -> None:
    with pytest.raises(ParamsError, match=f"^{message}"):
        MultiKVCacheParams.from_params(params)


BAD: list[Any] = [5, None, [], {}, "x", 1.5, True, [[1]], {1: 2}, np.array([1, 2]), object()]


def layout_of() -> dict[str, Any]:
    return KVCacheParams(**LLAMA_8B, quantization=KVCacheQuantization("int8")).layout_dict()


@pytest.mark.parametrize("value", BAD, ids=lambda value: type(value).__name__)
@pytest.mark.parametrize(
    "read",
    [
        KVCacheParams.from_layout,
        params_from_layout,
        lambda value: params_from_layout({"a": layout_of(), "b": {"c": value}}),
        lambda value: KVCacheParams(**LLAMA_8B).require_layout(value, source="a test"),
        shards_of,
    ],
)
def test_what_is_no_layout(read: Callable[[Any], object], value: Any) -> None:
    with pytest.raises(
        ParamsError, match=r"^(layout|n_shards|cache_strategy): expected |^layout\."
    ):
        read(value)


NONE = type(None)
RIGHT: dict[str, tuple[type, ...]] = {
    "dtype": (),
    "window_size": (int, NONE),
    "quantization": (NONE,),
    "is_mla": (bool,),
    "layout": (),
    "cache_strategy": (),
}
"""Types in BAD that a field may have; whole numbers by default."""


@pytest.mark.parametrize("value", BAD, ids=lambda value: type(value).__name__)
@pytest.mark.parametrize("name", layout_of())
def test_a_field_of_a_layout_of_another_type(name: str, value: Any) -> None:
    if type(value) in RIGHT.get(name, (int,)):
        return
    for layout in (layout_of() | {name: value}, {"a": layout_of() | {name: value}}):
        with pytest.raises(ParamsError, match=name):
            params_from_layout(layout)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda m: m.pop("dtype"), "layout: dtype: expected a value, got none"),
        (lambda m: m.pop("n_kv_heads"), "layout: n_kv_heads: expected a value, got none"),
        (lambda m: m.update(flavour=1), "layout: expected fields of a cache, got another one, 'fl"),
        (lambda m: m.update(devices=1), "layout: expected fields of a cache, got another one, 'de"),
        (lambda m: m.update({1: 2}), "layout: expected fields of a cache, got another one, 1"),
        (
            lambda m: m["quantization"].pop("dtype"),
            r"layout\.quantization: dtype: expected a value, got none",
        ),
        (
            lambda m: m["quantization"].update(bits=8),
            r"layout\.quantization: expected fields of a cache, got another one, 'bits'",
        ),
        (
            lambda m: m["quantization"].update(dtype=np.array([1, 2])),
            r"quantization\.dtype: expected one of",
        ),
    ],
)
def test_fields_that_a_layout_does_not_have(
    edit: Callable[[dict[str, Any]], object], message: str
) -> None:
    layout = layout_of()
    edit(layout)
    for read in (params_from_layout, KVCacheParams.from_layout):
        with pytest.raises(ParamsError, match=f"^{message}"):
            read(layout)
    assert KVCacheParams.from_layout(MappingProxyType(layout_of())) == params_from_layout(
        layout_of()
    )


@pytest.mark.parametrize("name", ["dtype", "layout", "cache_strategy", "hash_algorithm"])
def test_an_array_in_place_of_text(name: str) -> None:
    with pytest.raises(ParamsError, match=f"^{name}: expected "):
        KVCacheParams(**LLAMA_8B | {name: np.array(["sha256", "nhd"])})


@pytest.mark.parametrize("children", [5, None, "ab", ["ab"], ({"a": 1},)])
def test_a_tree_made_without_pairs(children: Any) -> None:
    with pytest.raises(ParamsError, match=r"^MultiKVCacheParams: expected "):
        MultiKVCacheParams(children)


@pytest.mark.parametrize("field", ["page_size", "num_layers", "n_kv_heads", "window_size"])
def test_a_differing_layout_field_is_named_with_both_values(field: str) -> None:
    layout = KVCacheParams(**LLAMA_8B).layout_dict()
    other = KVCacheParams(**LLAMA_8B | {field: 4})
    with pytest.raises(
        ParamsError, match=rf"{field}: expected {layout[field]} from the artifact, got 4"
    ):
        other.require_layout(layout, source="the artifact")


def quantised(granularity: int) -> KVCacheParams:
    quantization = KVCacheQuantization("int8", granularity=granularity)
    return KVCacheParams("float32", 4, 16, 2, quantization=quantization)


def test_a_granularity_beyond_a_head_means_the_head() -> None:
    """Also in layouts that were written before it was said so."""
    layout = quantised(128).layout_dict()
    assert layout == quantised(16).layout_dict() == quantised(64).layout_dict()
    before = layout | {"quantization": {**layout["quantization"], "granularity": 128}}  # type: ignore[dict-item]
    for granularity in (16, 128):
        quantised(granularity).require_layout(before, source="the artifact")
    with pytest.raises(
        ParamsError, match=r"quantization: expected .*'granularity': 128.* got .*: 8"
    ):
        quantised(8).require_layout(before, source="the artifact")
    assert params_from_layout(before).layout_dict() == layout


@pytest.mark.parametrize("strategy", ["continuous", "padded"])
def test_only_a_paged_cache_has_a_page_size(strategy: str) -> None:
    kind = {"cache_strategy": strategy}
    layout = KVCacheParams(**LLAMA_8B | kind).layout_dict()
    other = KVCacheParams(**LLAMA_8B | kind | {"page_size": 16})
    assert other.layout_dict() == layout
    for written in (layout, layout | {"page_size": 128}):  # as artifacts have it, and had it
        other.require_layout(written, source="the artifact")
    with pytest.raises(ParamsError, match=f"^cache_strategy: expected '{strategy}' from the art"):
        KVCacheParams(**LLAMA_8B).require_layout(layout, source="the artifact")
    assert KVCacheParams(**LLAMA_8B).layout_dict()["page_size"] == 128


def test_deployment_fields_never_differ() -> None:
    layout = KVCacheParams(**LLAMA_8B).layout_dict()
    two = tuple(virtual_devices("cuda:sm_90", 2))
    KVCacheParams(
        **LLAMA_8B, devices=two, data_parallel_degree=2, enable_prefix_caching=True
    ).require_layout(layout, source="the artifact")


def test_leaves_of_a_tree_have_names_and_dims_of_their_own() -> None:
    leaf = KVCacheParams(**LLAMA_8B)
    nested = MultiKVCacheParams.from_params({"b": leaf})
    with pytest.raises(ParamsError, match="names whose dims differ, got 'a_b' and another leaf"):
        MultiKVCacheParams.from_params({"a_b": leaf, "a": nested})
    with pytest.raises(ParamsError, match="cache name: expected each once, got 'a' twice"):
        MultiKVCacheParams((("a", leaf), ("a", leaf)))
