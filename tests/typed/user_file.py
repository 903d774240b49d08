"""What a user writes, for type checkers alone: it is never run.

Each `type: ignore` stands on a mistake; a checker that finds none there reports the comment.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import assert_type

import numpy as np
import numpy.typing as npt
from torch import Tensor

import kvgraph
from kvgraph import ops


def symbols() -> None:
    params = kvgraph.KVCacheParams("float32", 2, 16, 2, devices=(kvgraph.Device("cpu"),))
    record = params.get_symbolic_inputs()[0]
    if isinstance(record, kvgraph.PagedCacheInputSymbols):
        assert_type(record.kv_blocks, kvgraph.TensorType)
        assert_type(record.kv_scales, kvgraph.TensorType | None)
    assert_type(record.symbols(), tuple[kvgraph.TensorType, ...])
    tree = kvgraph.MultiKVCacheParams.from_params({"full": params})
    assert_type(tree.get_symbolic_inputs(), list[kvgraph.MultiKVCacheInputSymbols])
    signature = kvgraph.GraphSignature.of(record, vocab_size=256)
    arguments, _ = signature.to_torch_export()
    assert_type(arguments, tuple[Tensor, ...])
    record.kv_block  # type: ignore  # noqa: B018


class Allocator:
    """A session of the user's own, as far as a manager needs one."""

    identity = b""

    def allocate(self, symbol: kvgraph.TensorType, sizes: Mapping[str, int]) -> kvgraph.Buffer:
        return kvgraph.Buffer(symbol.dtype, symbol.extents(sizes), symbol.device)


def manager(params: kvgraph.KVCacheParams, session: kvgraph.Session) -> None:
    kv = kvgraph.PagedKVCacheManager(params, session, 8, max_batch_size=2)
    context = kvgraph.TextContext("a", np.array([1, 2, 3], np.int32))
    kv.claim(context.request_id)
    kv.alloc(context)
    inputs = kv.runtime_inputs([[context]])
    assert_type(inputs, kvgraph.KVCacheInputs)
    assert_type(inputs.flatten(), list[kvgraph.Buffer])
    for record in inputs.inputs:
        if isinstance(record, kvgraph.RaggedKVCacheInputs):
            assert_type(record.lookup_table, kvgraph.Buffer)
    step = kvgraph.ModelInputs(*(np.zeros(1, np.int32) for _ in range(3)))
    assert_type(session.run(step, inputs), npt.NDArray[np.float32])
    assert_type(kv.increment_cache_lengths(inputs, step), kvgraph.KVCacheInputs)
    kvgraph.NullKVCacheManager(params, 2, 64, session=session)
    kv.claim(context.request_id, replica="0")  # type: ignore


def engine(folder: Path) -> None:
    artifact = kvgraph.load(folder)
    assert_type(artifact, kvgraph.Artifact)
    assert_type(artifact.manifest, kvgraph.Manifest)
    kvgraph.Engine(artifact, num_pages="8")  # type: ignore
    kvgraph.Engine(artifact, num_page=8)  # type: ignore
    batch = kvgraph.BatchConfig(max_batch_size=2)
    with kvgraph.Engine(artifact, batch=batch, num_pages=8, disk=folder / "pages") as running:
        assert_type(running.session, kvgraph.Session)
        done = running.generate(["one", [1, 2]], kvgraph.SamplingParams(max_tokens=4, stop="end"))
        assert_type(done, list[kvgraph.Completion])
        assert_type(done[0].token_ids, list[int])
        assert_type(running.step(), list[kvgraph.Token])
        messages = [{"role": "user", "content": "one"}]
        assert_type(running.chat(messages, tools=[{"type": "function"}]), kvgraph.Completion)
        assert_type(running.apply_chat_template(messages), list[int])
        running.chat(messages, chat_templates="x")  # type: ignore
        running.generate("one", sampling=3)  # type: ignore


def compiled(out: Path) -> kvgraph.Manifest:
    try:
        return kvgraph.compile("model", out, target="cpu", weights="int8")
    except kvgraph.KVGraphError as error:
        raise SystemExit(str(error)) from error


def attend(q: Tensor, k: Tensor, v: Tensor, cache: Sequence[Tensor]) -> Tensor:
    pool, lengths, table, longest, offsets = cache
    ops.store_kv(pool, k, v, offsets, lengths, table, layer=0)
    out = ops.paged_attention(q, pool, offsets, lengths, table, longest, layer=0, scale=0.25)
    assert_type(out, Tensor)
    ops.paged_attention(q, pool, offsets, lengths, table, longest)  # type: ignore
    return out


def names() -> str:
    kvgraph.Motor  # type: ignore  # noqa: B018
    return kvgraph.__version__


ALLOCATOR: kvgraph.SessionInterface = Allocator()
