"""A CUDA artifact through compiled hosts whose driver executes PTX: linear layers on the CPU.

LD_LIBRARY_PATH=DRIVER HOST=host.so python -m tests.executed.process FOLDER REQUEST.json

FOLDER is of `artifacts.with_ptx`. REQUEST holds `host` ("launcher", "tensorrt", "onnxruntime"),
`kernels` (a folder), `prompts`, `new_tokens`, `engine` (arguments), and `changes`, pairs for
`change_of`, each for a run of its own; none: one run of plans as they are. Prints JSON, a list of
runs: tokens and what was launched and executed, or `refused`.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from kvgraph.errors import KVGraphError
from kvgraph.runtime.artifact import verify
from kvgraph.runtime.engine import Engine
from kvgraph.runtime.sampling import SamplingParams
from kvgraph.runtime.sessions import launches
from kvgraph.runtime.sessions.cuda import CudaSession
from tests.executed.gpu import ExecutingGpu, change_of


def main() -> None:
    folder, request = Path(sys.argv[1]), json.loads(Path(sys.argv[2]).read_text())
    if request["host"] != "launcher":
        from tests.executed.plugins import ATTENTION

        launches.Attention = ATTENTION[request["host"]]  # type: ignore[misc]
    gpu = ExecutingGpu(Path(request["kernels"]), folder / "ptx", Path(request["records"]))
    runs = []
    for change in request["changes"] or [None]:
        gpu.change = change and change_of(*change)
        runs.append(run(folder, gpu, request))
    print(json.dumps(runs))


def run(folder: Path, gpu: ExecutingGpu, request: dict[str, Any]) -> dict[str, Any]:
    artifact = verify(folder / "artifact")
    sampling = SamplingParams(max_new_tokens=request["new_tokens"], ignore_eos=True)
    try:
        engine = Engine(artifact, session=CudaSession(artifact, gpu), **request["engine"])
        done = engine.generate(request["prompts"], sampling)
    except KVGraphError as error:
        return {"refused": [type(error).__name__, str(error)]}
    return {
        "tokens": [each.token_ids for each in done],
        "launched": gpu.executor.launched,
        "executed": gpu.executor.executed,
    }


if __name__ == "__main__":
    main()
