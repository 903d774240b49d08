"""Values that a session is given and that are not what they say."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvgraph
from kvgraph import BindingError, Buffer, MultiKVCacheParams, ParamsError, virtual_devices
from kvgraph.contract.inputs import KVCacheInputs, ModelInputs, PaddedKVCacheInputs
from kvgraph.kv.continuous import ContinuousBatchingKVCacheManager
from kvgraph.kv.null import NullKVCacheManager
from kvgraph.kv.padded import PaddedKVCacheManager
from kvgraph.kv.paged import PagedKVCacheManager
from kvgraph.kv.requests import TextContext
from tests.runtime.drive import inputs_of
from tests.support.artifacts import TINY_LLAMA

Compiled = Callable[..., Path]
Step = tuple[Any, ModelInputs, KVCacheInputs]


@pytest.fixture(params=["onnx", "torch"])
def step(compiled: Compiled, request: pytest.FixtureRequest) -> Step:
    """A session that ran a step, and the values of that."""
    session = kvgraph.load(compiled("tiny-llama", request.param)).session()
    kv = PagedKVCacheManager(session.artifact.params(), session, 4, max_batch_size=1)
    context = TextContext("a", [1, 2, 3])
    kv.claim("a")
    kv.alloc(context)
    inputs, record = inputs_of([context]), kv.runtime_inputs([[context]]).inputs[0]
    session.run(inputs, record)
    return session, inputs, record


def with_pool(record: KVCacheInputs, handle: object) -> KVCacheInputs:
    """The record over another pool, of which its buffer says the same."""
    return record.unflatten([replace(record[0], handle=handle), *record[1:]])  # type: ignore[misc]


@pytest.mark.parametrize(
    ("change", "got"),
    [
        (lambda pool: pool.astype(np.float16), "float16"),
        (lambda pool: pool[:1].copy(), "float32 [1, "),
        (lambda pool: pool.astype(">f4"), ">f4"),
    ],
)
def test_memory_that_is_not_what_its_buffer_says(
    step: Step, change: Callable[[Any], Any], got: str
) -> None:
    """Dtype and shape are those of the step before: the array is another."""
    session, inputs, record = step
    pool = np.asarray(record[0])
    for _ in range(2):
        with pytest.raises(BindingError) as refused:
            session.run(inputs, with_pool(record, change(pool)))
        shape = list(pool.shape)
        assert str(refused.value).startswith(
            f"kv_blocks: expected memory of float32 {shape} from its buffer, got {got}"
        )
    expected = session.run(inputs, record).copy()
    np.testing.assert_array_equal(session.run(inputs, with_pool(record, pool.copy())), expected)


def test_a_buffer_of_another_device(step: Step) -> None:
    session, inputs, record = step
    pool = np.asarray(record[0]).copy()
    other = Buffer(record[0].dtype, pool.shape, virtual_devices("cuda:sm_90")[0].logical, pool)
    with pytest.raises(BindingError, match=r"^kv_blocks: expected memory on cpu:0, got .* cuda:0$"):
        session.run(inputs, record.unflatten([other, *record[1:]]))  # type: ignore[misc]


@pytest.mark.parametrize("at", [0, 1, 2])
def test_memory_that_is_no_array(step: Step, at: int) -> None:
    """Nor is what came before it forgotten: the next step is compared again."""
    torch = pytest.importorskip("torch")
    session, inputs, record = step
    values = list(record)
    name = session.signature.inputs[3 + at].name
    held = np.asarray(values[at])

    def holding(handle: object) -> KVCacheInputs:
        return record.unflatten(  # type: ignore[misc]
            [
                *values[:at],
                Buffer(str(held.dtype), held.shape, record[0].device, handle),
                *values[at + 1 :],
            ]
        )

    for handle in (torch.from_numpy(held.copy()), held.tolist()):
        message = rf"^{name}: expected an array of .*, got {type(handle).__name__}$"
        with pytest.raises(BindingError, match=message):
            session.run(inputs, holding(handle))
        with pytest.raises(BindingError, match=f"^{name}: expected memory of .*, got int16"):
            session.run(inputs, holding(held.astype(np.int16)))
    assert session.run(inputs, record).shape[0] == 1


def test_dummies_have_no_memory(step: Step) -> None:
    session, inputs, record = step
    null = NullKVCacheManager(session.artifact.params(), 1, 64)
    null.claim("a")
    dummies = null.runtime_inputs([[TextContext("a", [1, 2, 3])]]).inputs[0]
    index = record.unflatten([*record[:1], *dummies[1:]])  # type: ignore[misc]
    for given, name in (
        (dummies, "kv_blocks"),
        (with_pool(record, None), "kv_blocks"),
        (index, "cache_lengths"),
    ):
        with pytest.raises(BindingError) as refused:
            session.run(inputs, given)
        assert str(refused.value) == (
            f"{name}: expected a value with memory, got a dummy of a manager that allocates nothing"
        )
    assert session.run(inputs, record).shape[0] == 1


def test_values_are_equal_to_themselves_alone(step: Step) -> None:
    _, inputs, record = step
    pool: Buffer = record[0]
    for value in (inputs, pool):
        assert value == value
        assert value != replace(value)
        assert value in {value}


def test_a_step_without_tokens_has_no_logits(step: Step) -> None:
    """It would give memory that nothing wrote."""
    session, _, record = step
    none, zeros = np.zeros(0, np.int32), np.zeros(2, np.int32)
    assert session.run(ModelInputs(none, zeros, none), record).shape == (0, 2048)
    for offsets, rows in ((zeros, zeros[:1]), (np.array([0, 3], np.int32), none)):
        with pytest.raises(BindingError, match=r"^tokens: expected some for .* got none$"):
            session.run(ModelInputs(none, offsets, rows), record)


@pytest.mark.parametrize("number", [-1, 2048, -(2**31), 2**31 - 1])
def test_a_token_that_the_model_has_not_is_refused(step: Step, number: int) -> None:
    """For a negative one a table of embeddings would give one of its last rows."""
    session, inputs, record = step
    tokens = inputs.tokens.copy()
    tokens[1] = number
    message = rf"^tokens: expected numbers in \[0, 2048\), got {number}$"
    with pytest.raises(BindingError, match=message):
        session.run(replace(inputs, tokens=tokens), record)


@pytest.mark.parametrize("number", [-1, 3])
def test_logits_of_a_token_that_the_step_has_not_are_refused(step: Step, number: int) -> None:
    session, inputs, record = step
    assert len(inputs.tokens) == 3
    given = replace(inputs, logits_indices=np.array([0, number], np.int32))
    message = rf"^logits_indices: expected numbers in \[0, 3\), got {number}$"
    with pytest.raises(BindingError, match=message):
        session.run(given, record)


@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize("backend", ["onnx", "torch"])
def test_buffers_that_share_memory(compiled: Compiled, backend: str, shift: int) -> None:
    """All of it, or a part. A step after one that was right is compared too."""
    session = kvgraph.load(compiled("gemma2", backend)).session()
    kv = PagedKVCacheManager(session.artifact.params(), session, 4, max_batch_size=1)
    context = TextContext("a", [1, 2, 3])
    kv.claim("a")
    kv.alloc(context)
    inputs, record = inputs_of([context]), kv.runtime_inputs([[context]]).inputs[0]
    expected = session.run(inputs, record).copy()
    values = record.flatten()
    one, other = (i - 3 for i, s in enumerate(session.signature.inputs) if s.kind == "buffer")
    memory = np.zeros(sum(np.asarray(values[i]).size for i in (one, other)), np.float32)
    for i, start in ((one, 0), (other, shift)):
        shape = np.asarray(values[i]).shape
        own = memory[start : start + math.prod(shape)].reshape(shape)
        values[i] = replace(values[i], handle=own)
    first, second = (session.signature.inputs[3 + i].name for i in (one, other))
    for _ in range(2):
        with pytest.raises(BindingError) as refused:
            session.run(inputs, record.unflatten(values))
        assert str(refused.value) == (
            f"{second}: expected memory of its own, got memory that {first} has too"
        )
    np.testing.assert_array_equal(session.run(inputs, record), expected)


@pytest.mark.parametrize(
    ("given", "name"),
    [(np.zeros(3), "ndarray"), (np.float32(1), "float32"), (PaddedKVCacheInputs, "type")],
)
def test_what_is_no_record(step: Step, given: Any, name: str) -> None:
    """Although it has `flatten` too."""
    session, inputs, _ = step
    with pytest.raises(BindingError, match=f"^cache: expected one device's .* got {name}$"):
        session.run(inputs, given)


def test_an_engine_over_the_session_of_another_artifact(compiled: Compiled, tmp_path: Path) -> None:
    """A copy of the artifact is the same one, and so is what a second compile makes."""
    own, other = compiled("tiny-llama"), compiled("tiny-llama", "torch")
    with pytest.raises(kvgraph.RequestError) as refused:
        kvgraph.Engine(own, session=kvgraph.load(other).session())
    assert str(refused.value) == (
        f"session: expected one of {own}, got one of {other}, which is another artifact: "
        "model.onnx differs"
    )
    copy = shutil.copytree(own, tmp_path / "copy")
    assert kvgraph.Engine(own, session=kvgraph.load(copy).session()).generate([[5]])
    again = tmp_path / "again"
    kvgraph.compile(TINY_LLAMA, again, backend="onnx", page_size=16, check=False)
    assert kvgraph.Engine(own, session=kvgraph.load(again).session()).generate([[5]])


@pytest.mark.parametrize("kind", [ContinuousBatchingKVCacheManager, PaddedKVCacheManager])
def test_a_tree_of_caches_for_a_manager_of_one(kind: Any) -> None:
    params = kvgraph.KVCacheParams("float32", n_kv_heads=2, head_dim=8, num_layers=1)
    tree = MultiKVCacheParams.from_params({"a": params})
    with pytest.raises(ParamsError, match=r"^params: expected KVCacheParams for a .* got MultiKV"):
        kind(tree, 2, 64)


@pytest.mark.parametrize("given", [None, (1, 2, 3), {}])
def test_inputs_of_another_type(step: Step, given: Any) -> None:
    session, _, record = step
    with pytest.raises(BindingError, match=r"^inputs: expected ModelInputs, got "):
        session.run(given, record)


def test_a_graphs_own_inputs_as_buffers(step: Step) -> None:
    session, inputs, record = step
    device = session.signature.inputs[0].device
    expected = session.run(inputs, record).copy()

    def held(values: np.ndarray[Any, Any]) -> Any:
        return Buffer("int32", values.shape, device, values)

    buffers = ModelInputs(*map(held, vars_of(inputs)))
    np.testing.assert_array_equal(session.run(buffers, record), expected)
    none, zeros = held(np.zeros(0, np.int32)), held(np.zeros(2, np.int32))
    assert session.run(ModelInputs(none, zeros, none), record).shape == (0, 2048)
    with pytest.raises(BindingError, match=r"^tokens: expected some for 0 logits_indices and .* 3"):
        session.run(ModelInputs(none, buffers.input_row_offsets, none), record)


def vars_of(inputs: ModelInputs) -> list[np.ndarray[Any, Any]]:
    return [inputs.tokens, inputs.input_row_offsets, inputs.logits_indices]


def unaligned(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The same values at an odd address."""
    memory = np.zeros(array.nbytes + array.itemsize, np.uint8)
    start = 1 - memory.ctypes.data % 2
    view = memory[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    view[...] = array
    assert not view.flags.aligned
    return view


def test_memory_at_an_odd_address(step: Step) -> None:
    """Of a tensor it is copied; of a buffer it is refused, before the graph has begun."""
    session, inputs, record = step
    expected = session.run(inputs, record).copy()
    odd = ModelInputs(*map(unaligned, vars_of(inputs)))
    np.testing.assert_array_equal(session.run(odd, record), expected)
    pool = unaligned(np.asarray(record[0]))
    before = pool.copy()
    message = r"^kv_blocks: expected writeable, aligned, .* got .*writeable=True and aligned=False$"
    with pytest.raises(BindingError, match=message):
        session.run(inputs, with_pool(record, pool))
    np.testing.assert_array_equal(pool, before)


def test_a_reversed_axis_of_one_element(step: Step) -> None:
    """It is row-major memory, of tensors and of buffers."""
    session, inputs, record = step
    expected = session.run(inputs, record).copy()

    def reversed_over(value: Any) -> Any:
        array = np.asarray(value)
        flipped = array[tuple(slice(None, None, -1 if n == 1 else 1) for n in array.shape)]
        return replace(value, handle=flipped) if isinstance(value, Buffer) else flipped

    pool = np.asarray(record[0])
    pool[...] = 0
    given = ModelInputs(*map(reversed_over, vars_of(inputs)))
    assert given.logits_indices.strides == (-4,)
    values = record.unflatten(list(map(reversed_over, record)))  # type: ignore[misc]
    np.testing.assert_array_equal(session.run(given, values), expected)
    assert pool.any()


def test_no_devices_are_not_the_artifacts_own(step: Step) -> None:
    with pytest.raises(kvgraph.ParamsError, match=r"^devices: expected at least"):
        step[0].artifact.params([])
    with pytest.raises(kvgraph.ParamsError, match=r"^devices: expected a sequence of Devices, got"):
        step[0].artifact.params(kvgraph.Device("cpu"))


FALLING = "input_row_offsets: expected none below its predecessor, got "
ROOM = "start_pos: expected a number in [0, 13], so that 3 new tokens fit in a row of 16, got "


@pytest.mark.parametrize(
    ("offsets", "start_pos", "message"),
    [
        ([1, 3, 3], 0, "input_row_offsets: expected 0 first, got 1"),
        ([0, 3, 2], 0, f"{FALLING}2 after 3"),
        ([0, 0, -1], 0, f"{FALLING}-1 after 0"),
        ([0, 2, 2], 0, "input_row_offsets: expected total_seq_len 3 last, got 2"),
        ([0, 2, 5], 0, "input_row_offsets: expected total_seq_len 3 last, got 5"),
        ([0, 3, 3], -1, f"{ROOM}-1"),
        ([0, 0, 3], 14, f"{ROOM}14"),
        ([0, 3, 3], 2**31 - 1, f"{ROOM}{2**31 - 1}"),
    ],
)
def test_a_padded_cache_has_no_room_for_what_is_refused(
    compiled: Compiled, offsets: list[int], start_pos: int, message: str
) -> None:
    """Its operators would read and write other slots; the rectangle stays as it was."""
    session = kvgraph.load(compiled("tiny-llama", cache="padded")).session()
    kv = PaddedKVCacheManager(session.artifact.params(), 2, 16, session=session)
    record, indices = kv.runtime_inputs([[]]).inputs[0], np.array([2], np.int32)
    tokens = np.array([5, 6, 7], np.int32)
    record.start_pos.handle[0] = start_pos  # type: ignore[attr-defined]
    with pytest.raises(BindingError) as refused:
        session.run(ModelInputs(tokens, np.array(offsets, np.int32), indices), record)
    assert str(refused.value) == message
    assert not np.asarray(record[0]).any()
    record.start_pos.handle[0] = 13  # type: ignore[attr-defined]
    fitting = ModelInputs(tokens, np.array([0, 3, 3], np.int32), indices)
    assert np.isfinite(session.run(fitting, record)).all()
