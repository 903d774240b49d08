"""Several caches behind one request: symbols, values, windows that free their own pages."""

from __future__ import annotations

import numpy as np
import pytest

from kvgraph.contract.devices import Device, virtual_devices
from kvgraph.contract.inputs import Buffer, KVCacheInputsSequence, MultiKVCacheInputs
from kvgraph.contract.params import KVCacheParams
from kvgraph.contract.trees import MultiKVCacheParams
from kvgraph.errors import BindingError, ParamsError
from kvgraph.kv.memory import plan_memory
from kvgraph.kv.null import NullKVCacheManager
from kvgraph.kv.paged import PagedKVCacheManager
from tests.support.builders import decode, make_params, start


def make_tree(tp: int = 1, dp: int = 1, **changes: object) -> MultiKVCacheParams:
    """`full`, and `local.sliding` with window 9 and one more layer."""
    local = {"sliding": make_params(tp, dp, window_size=9, num_layers=3, **changes)}
    return MultiKVCacheParams.from_params(
        {"full": make_params(tp, dp, **changes), "local": MultiKVCacheParams.from_params(local)}
    )


def make_manager(tp: int = 1, dp: int = 1, pages: object = 10) -> PagedKVCacheManager:
    return PagedKVCacheManager(
        make_tree(tp, dp),
        None,
        pages,  # type: ignore[arg-type]
        enable_runtime_checks=True,
        max_batch_size=4,
    )


def test_leaves_and_bytes_add_up() -> None:
    tree = make_tree()
    assert list(tree.leaves) == ["full", "local.sliding"]
    full, sliding = tree.leaves.values()
    assert tree.bytes_per_page == full.bytes_per_page + sliding.bytes_per_page
    assert plan_memory(tree, 10 * tree.bytes_per_page, 1, 1000).num_pages == 10
    assert tree.layout_dict()["full"] == full.layout_dict()
    assert hash(tree) == hash(make_tree())


def test_symbols_carry_the_path() -> None:
    (record,) = make_tree().get_symbolic_inputs()
    assert [symbol.name for symbol in record][3:5] == [
        "full.max_lengths",
        "local.sliding.kv_blocks",
    ]
    assert record[4].shape == ("local_sliding_num_page_slots", 2, 3, 4, 2, 8)
    assert record[6].shape == ("batch_size", "local_sliding_max_num_pages")
    assert len(record) == 8


@pytest.mark.parametrize(("tp", "dp"), [(1, 1), (2, 1), (1, 2), (2, 2)])
def test_values_bind_to_the_symbols_of_null_and_paged(tp: int, dp: int) -> None:
    manager, tree = make_manager(tp, dp), make_tree(tp, dp)
    null = NullKVCacheManager(tree, 4, 64, 5, tree.devices, None, 0, page_size=4)
    assert null.get_symbolic_inputs() == manager.get_symbolic_inputs() == tree.input_symbols()
    batches = [[start(manager, f"r{i}", range(5 + i), i)] for i in range(dp)]
    symbols = [symbol for record in manager.input_symbols() for symbol in record]
    for inputs in (manager.runtime_inputs(batches), null.runtime_inputs([[]] * dp)):
        assert isinstance(inputs, MultiKVCacheInputs)
        sizes: dict[str, int] = {}
        for symbol, value in zip(symbols, inputs.flatten(), strict=True):
            symbol.bind(value.dtype, value.shape, sizes)
        assert len(inputs.inputs) == tp * dp
        assert inputs.inputs[0].flatten() == inputs.flatten()[:8]


def test_flatten_and_unflatten_round_trip() -> None:
    manager = make_manager(tp=2)
    a = start(manager, "a", range(5))
    for inputs in (
        manager.runtime_inputs([[a]]),
        manager.runtime_inputs([[a]]).inputs[1],
        KVCacheInputsSequence([manager.runtime_inputs([[a]])]),
    ):
        values = [Buffer(v.dtype, v.shape, v.device, i) for i, v in enumerate(inputs.flatten())]
        rebuilt = inputs.unflatten(values)
        assert type(rebuilt) is type(inputs)
        assert [value.handle for value in rebuilt.flatten()] == list(range(len(values)))
        for wrong in (values[1:], [*values, values[0]]):
            with pytest.raises(BindingError, match=f"expected {len(values)} .*got {len(wrong)}"):
                inputs.unflatten(wrong)


def test_a_sliding_leaf_holds_only_its_window() -> None:
    manager = make_manager(pages={"full": 30, "local.sliding": 5})
    a = start(manager, "a", range(17))
    decode(manager, a, *range(80))
    full, sliding = manager._replicas[0].leaves
    assert (full.pool.num_used, sliding.pool.num_used) == (25, 3)
    blocks = manager.get_req_blocks("a", leaf="local.sliding")
    assert [page == 5 for page in blocks] == [True] * 22 + [False] * 3
    assert len(manager.get_req_blocks("a")) == 25
    assert manager.total_num_blocks() == 35
    record = manager.runtime_inputs([[a]]).inputs[0]
    tables = [record.children["full"], record.children["local"].children["sliding"]]
    assert [t.lookup_table.shape for t in tables] == [(1, 25)] * 2
    assert np.asarray(tables[1].lookup_table)[0].tolist() == manager.get_req_blocks(
        "a", leaf="local.sliding"
    )


def test_too_few_pages_in_one_leaf_changes_none() -> None:
    manager = make_manager(pages={"full": 30, "local.sliding": 5})
    with pytest.raises(RuntimeError, match=r"at most the whole pool of 5 pages, got one .* 6"):
        start(manager, "a", range(24))
    assert manager.get_num_used_pages() == 0


def test_a_tree_is_no_single_leaf() -> None:
    manager = make_manager()
    with pytest.raises(AssertionError, match=r"single cache, got a tree of \['full'"):
        manager.runtime_inputs_for_leaf([[]])
    manager.claim("a")
    with pytest.raises(ValueError, match=r"leaf: expected one of .*got 'none'"):
        manager.get_req_blocks("a", leaf="none")
    with pytest.raises(ParamsError, match=r"leaves \['full', 'local.sliding'\], got \['full'\]"):
        make_manager(pages={"full": 3})


@pytest.mark.parametrize(
    ("name", "first", "second"),
    [
        ("page_size", 4, 8),
        ("devices", (Device("cpu"),), tuple(virtual_devices("cuda:sm_90"))),
        ("enable_prefix_caching", False, True),
        ("hash_seed", None, b"s" * 32),
    ],
)
def test_leaves_must_agree(name: str, first: object, second: object) -> None:
    def of(value: object) -> KVCacheParams:
        return make_params(**{name: value})

    with pytest.raises(ParamsError, match=rf"{name}: expected .* in leaf 'a', got .* in leaf 'b'"):
        MultiKVCacheParams.from_params({"a": of(first), "b": of(second)})


def test_degenerate_trees() -> None:
    with pytest.raises(ParamsError, match="at least one cache, got none"):
        MultiKVCacheParams.from_params({})
    with pytest.raises(ParamsError, match=r"no layout field, got 'dtype'"):
        MultiKVCacheParams.from_params({"dtype": make_params()})
    with pytest.raises(ParamsError, match=r"identifier .*, got 'a\.b'"):
        MultiKVCacheParams.from_params({"a.b": make_params()})
    with pytest.raises(ParamsError, match=r"num_layers: expected None .*got 3"):
        make_tree().get_symbolic_inputs(num_layers=3)
