"""One rank of a CUDA artifact on Triton's interpreter; torchrun's environment says which.

TRITON_INTERPRET=1 python -m tests.ranks.interpreted ARTIFACT REQUEST.json

REQUEST as of tests/runtime/interpreted.py. Rank 0 prints JSON: tokens, captures, replays.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np

from kvgraph.runtime.artifact import verify
from kvgraph.runtime.engine import Engine
from kvgraph.runtime.folder import ArtifactFolder
from kvgraph.runtime.ranks.launched import launched
from kvgraph.runtime.ranks.sessions import follow, open_leader
from kvgraph.runtime.sampling import SamplingParams
from kvgraph.runtime.sessions.base import Session
from kvgraph.runtime.sessions.cuda import CudaSession
from tests.runtime.interpreted import InterpretedGpu
from tests.support.interpreter import mend


def main() -> None:
    folder, request = Path(sys.argv[1]), json.loads(Path(sys.argv[2]).read_text())
    mend()
    np.seterr(over="ignore")
    artifact, gpu = verify(folder), InterpretedGpu(folder, request["arch"])

    def make(part: ArtifactFolder, threads: int | None) -> Session:
        return CudaSession(part, gpu)

    own = launched()
    if own is not None and own.rank:
        follow(artifact, make, None, 120.0)
        return
    session = open_leader(artifact, make, None, 120.0)
    engine = Engine(artifact, session=session, **request["engine"])
    sampling = SamplingParams(max_new_tokens=request["new_tokens"], ignore_eos=True)
    tokens = [c.token_ids for c in engine.generate(request["prompts"], sampling)]
    print(json.dumps({"tokens": tokens, "captures": gpu.captures, "replays": gpu.replays}))


if __name__ == "__main__":
    main()
