"""The pool stays outside the graph: any size binds, nothing copies it, poison never surfaces."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvgraph
from kvgraph.contract.inputs import ModelInputs
from kvgraph.errors import KernelError
from kvgraph.runtime.sessions.onnxruntime import OnnxRuntimeSession

Compiled = Callable[..., Path]
PROMPTS = [list(range(3, 3 + n)) for n in (1, 15, 16, 17, 40)]
GREEDY = kvgraph.SamplingParams(max_new_tokens=20, ignore_eos=True)


def tokens(engine: kvgraph.Engine) -> list[list[int]]:
    return [done.token_ids for done in engine.generate(PROMPTS, GREEDY)]


def test_one_artifact_serves_pools_of_any_size(compiled: Compiled) -> None:
    folder = compiled("tiny-llama")
    few, more, many = (
        tokens(kvgraph.Engine(folder, num_pages=n, max_batch_size=8)) for n in (8, 100, 5000)
    )
    assert few == more == many


@pytest.mark.parametrize("session", ["onnxruntime", "reference"])
def test_poison_never_surfaces(compiled: Compiled, session: str) -> None:
    """NaN in spare pages, page tails and the null page; 17 + 20 tokens cross two page edges."""
    clean = kvgraph.Engine(compiled("gemma2"), session=session, num_pages=40)
    poisoned = kvgraph.Engine(compiled("gemma2"), session=session, num_pages=40)
    for buffer in poisoned.kv.get_device_buffer(0).all_buffers:
        buffer.handle[:] = np.nan
    assert tokens(poisoned) == tokens(clean)


class TwoBuffers(OnnxRuntimeSession):
    """Binds a pool's output to other memory than its input."""

    def _run(self, arrays: list[Any]) -> Any:
        binding = self._bindings[0].binding
        other = np.zeros_like(arrays[3])

        class Binding:
            bind_input = binding.bind_input

            @staticmethod
            def bind_output(name: str, *place: Any) -> None:
                binding.bind_output(name, *place[:-1], other.ctypes.data)

        self._bindings[0].inputs[3]._bindings = [Binding()]
        return super()._run(arrays)


def test_two_different_buffers_are_refused(compiled: Compiled) -> None:
    artifact = kvgraph.load(compiled("tiny-llama"))
    engine = kvgraph.Engine(artifact, session=TwoBuffers(artifact), num_pages=8)
    with pytest.raises(KernelError, match=r"kv_blocks_out: expected the address of kv_blocks"):
        engine.generate([[1, 2, 3]])


NO_COPY = """
import resource, sys
import kvgraph
engine = kvgraph.Engine(sys.argv[1], num_pages=1)
greedy = kvgraph.SamplingParams(max_new_tokens=8)
engine.generate([[1, 2, 3]], greedy)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
pages = (1 << 30) // engine.artifact.params().bytes_per_page
engine = kvgraph.Engine(engine.artifact, num_pages=pages)
engine.generate([[1, 2, 3]], greedy)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024)
"""


def test_a_step_copies_no_pool(compiled: Compiled) -> None:
    """A copy of the lazily zeroed 1 GiB pool would make all of it resident."""
    command = [sys.executable, "-c", NO_COPY, str(compiled("tiny-llama"))]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert int(done.stdout) < 200, "MiB that became resident with a 1 GiB pool"


COMPILE_RSS = """
import resource, sys
import kvgraph
peaks = []
for page_size in (1, 65536):
    kvgraph.compile(sys.argv[1], f"{sys.argv[2]}/{page_size}", page_size=page_size)
    peaks.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024)
print(peaks[1] - peaks[0])
"""


def test_compile_allocates_no_kv_memory(
    tmp_path: Path, model_folder: Callable[[str], Path]
) -> None:
    """One page of 65536 tokens is 128 MiB here; the traced pool would have several."""
    command = [sys.executable, "-c", COMPILE_RSS, str(model_folder("tiny-llama")), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert int(done.stdout) < 100, "MiB more at the peak than with pages of one token"


def test_arrays_that_are_not_dense(compiled: Compiled) -> None:
    """Tokens are copied into rows; a buffer that ops write in place never is."""
    engine = kvgraph.Engine(compiled("tiny-llama"), num_pages=8)
    context = kvgraph.TextContext("r", [5, 6, 7])
    with engine.kv.reserve([[context]]):
        kv = engine.kv.runtime_inputs([[context]])
        own = (np.array([0, 3], np.int32), np.array([2], np.int32))
        expected = engine.session.run(ModelInputs(np.array([5, 6, 7], np.int32), *own), kv)
        spread = np.array([5, 0, 6, 0, 7, 0], np.int32)[::2]
        np.testing.assert_array_equal(engine.session.run(ModelInputs(spread, *own), kv), expected)
        pool = kv.inputs[0].kv_blocks
        whole = pool.handle
        for bad in (np.broadcast_to(whole[:1], whole.shape), np.asfortranarray(whole)):
            pool.handle = bad
            with pytest.raises(
                kvgraph.BindingError, match="kv_blocks: expected writeable, aligned, row-m"
            ):
                engine.session.run(ModelInputs(spread, *own), kv)
        pool.handle = whole


def test_an_empty_batch_is_legal(compiled: Compiled) -> None:
    engine = kvgraph.Engine(compiled("tiny-llama"), num_pages=8)
    empty = np.zeros(0, np.int32)
    inputs = ModelInputs(empty, np.zeros(1, np.int32), empty)
    assert engine.session.run(inputs, engine.kv.runtime_inputs([[]])).shape == (0, 2048)


def test_values_that_do_not_fit_are_refused_before_the_run(compiled: Compiled) -> None:
    engine = kvgraph.Engine(compiled("tiny-llama"), num_pages=8)
    context = kvgraph.TextContext("r", [1, 2, 3])
    with engine.kv.reserve([[context]]):
        kv = engine.kv.runtime_inputs([[context]])
        offsets = np.array([0, 2, 3], np.int32)  # two rows, but the cache has one
        inputs = ModelInputs(context.active_tokens, offsets, np.array([2], np.int32))
        message = r"cache_lengths: dim 0 \(batch_size\) expected 2, got 1"
        with pytest.raises(kvgraph.BindingError, match=message):
            engine.session.run(inputs, kv)
