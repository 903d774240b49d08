"""A CUDA artifact on Triton's interpreter: the session's own code, kernels on CPU tensors.

TRITON_INTERPRET=1 python -m tests.runtime.interpreted ARTIFACT REQUEST.json

A process of its own: one process cannot both interpret kernels and compile them. REQUEST holds
`prompts` (token ids), `new_tokens`, `engine` (arguments); prints JSON: tokens, replays, captures.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kvgraph.contract.inputs import ModelInputs
from kvgraph.kernels.launch import LaunchPlan
from kvgraph.kernels.run import run
from kvgraph.kernels.variants import Variant
from kvgraph.kv.requests import TextContext
from kvgraph.runtime.artifact import verify
from kvgraph.runtime.engine import Engine
from kvgraph.runtime.sampling import SamplingParams
from kvgraph.runtime.sessions.cuda import CudaSession
from kvgraph.runtime.sessions.launches import Operands
from tests.runtime.drive import inputs_of
from tests.support.interpreter import mend


class InterpretedGpu:
    """Stands for a GPU of `arch`. A captured step is run again, over the memory it was given."""

    multiprocessors = 16

    def __init__(self, folder: Path, arch: str) -> None:
        self.device, self.arch = torch.device("cpu"), arch
        self._files = {path.stem for path in (folder / "kernels" / arch).glob("*.cubin")}
        self.launches = self.captures = self.replays = 0
        self.launched: set[str] = set()

    def free_memory(self) -> None:
        return None

    def require(self, variants: Iterable[Variant]) -> None:
        missing = [v.name for v in variants if v.name not in self._files]
        assert not missing, missing

    def launch(self, plan: LaunchPlan, operands: Operands) -> None:
        for one in plan.launches:
            self.require([one.variant])
            self.launched.add(f"{one.variant.kernel.name}-{one.variant.role}")
        self.launches += len(plan.launches)
        run(plan, operands)

    def capture(self, step: Callable[[], torch.Tensor]) -> Callable[[], torch.Tensor]:
        self.captures += 1
        before = step().clone()

        def replay() -> torch.Tensor:
            self.replays += 1
            return step()

        assert torch.equal(replay(), before), "a captured step runs twice over the same memory"
        return replay


def two_steps(engine: Engine, tokens: list[int]) -> bool:
    """Whether a step after `increment_cache_lengths` on the device equals one that was staged."""
    kv, session = engine.kv, engine.session
    context = TextContext("two steps", tokens)
    kv.claim(context.request_id)
    kv.alloc(context, num_steps=2)
    staged = kv.runtime_inputs([[context]], num_steps=2)
    first = inputs_of([context])
    token = int(session.run(first, staged).argmax())
    advanced = kv.increment_cache_lengths(staged, first)
    one = np.array([0, 1], np.int32)
    second = ModelInputs(np.array([token], np.int32), one, one[:1])
    found = session.run(second, advanced).copy()
    context.update(token)
    expected = session.run(second, kv.runtime_inputs([[context]]))
    kv.release(context.request_id)
    return bool((found == expected).all())


def main() -> None:
    folder, request = Path(sys.argv[1]), json.loads(Path(sys.argv[2]).read_text())
    mend()
    np.seterr(over="ignore")
    artifact = verify(folder)
    gpu = InterpretedGpu(folder, request.get("arch", "sm_90"))
    session = CudaSession(artifact, gpu)
    engine = Engine(artifact, session=session, **request["engine"])
    sampling = SamplingParams(max_new_tokens=request["new_tokens"], ignore_eos=True)
    out: dict[str, Any] = {
        "tokens": [c.token_ids for c in engine.generate(request["prompts"], sampling)],
        "captures": gpu.captures,
        "replays": gpu.replays,
        "launched": sorted(gpu.launched),
        "two_steps": two_steps(engine, request["prompts"][0]),
    }
    print(json.dumps(out))


if __name__ == "__main__":
    main()
