"""Backend `torch-tensorrt`: write the lowered program, the kernels and the plugins, but no engine.

torch-tensorrt builds only for the GPU of its own machine, so compile stops before the engine. On
the machine with the GPU, `kvgraph compile --from-artifact` builds it
(`kvgraph/rebuild/torch_engine.py`). It needs no Triton: the kernels come from the artifact.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from kvgraph.compiler.passes.lists import PASSES, run_passes
from kvgraph.compiler.targets import Lowered, write_build_log
from kvgraph.compiler.targets.cuda import attention_of_nodes, save_program
from kvgraph.compiler.targets.tensorrt.engine import (
    BY_TORCH,
    NOT_BUILT,
    profiles_of,
)
from kvgraph.compiler.targets.tensorrt.lower import write_kernels
from kvgraph.compiler.targets.torch import count_ops
from kvgraph.compiler.traced import Traced
from kvgraph.contract.dims import NUM_PAGE_SLOTS
from kvgraph.contract.file_names import BUILD_LOG_NAME, LIBRARY_NAME
from kvgraph.contract.manifest import EngineInfo
from kvgraph.ops.cuda_native import plugins_path

USUAL_SLOTS = 64
"""Most pages of a pool in the profile's usual (opt) shapes."""


def lower(
    traced: Traced,
    folder: Path,
    *,
    archs: Sequence[str],
    bounds: tuple[int, int],
    progress: Callable[[str], None],
) -> Lowered:
    """Write `model.pt2`, `weights.safetensors`, `kernels/` and the plugins into `folder`.

    `bounds`: most rows and most new tokens of a step.
    """
    attention = attention_of_nodes(traced)
    run_passes(traced, PASSES["cuda", "torch-tensorrt"].program)
    save_program(traced, folder, progress)
    nodes = {f"layer{i}": shape for i, shape in enumerate(attention)}
    seconds = write_kernels(nodes, archs, folder, progress)
    shutil.copyfile(plugins_path(), folder / LIBRARY_NAME)
    write_build_log(folder, {"compile_seconds": seconds})
    profile = profiles_of(traced.signature, traced.model.max_seq_len, *bounds)[-1]
    # torch-tensorrt allocates tensors of the usual (opt) sizes, so a large pool would not fit.
    usual = {
        d: min(n, USUAL_SLOTS) if d.endswith(NUM_PAGE_SLOTS) else n for d, n in profile.opt.items()
    }
    return Lowered(
        ops=count_ops(traced.program),
        passes=traced.passes,
        nondeterministic_files=[BUILD_LOG_NAME],
        engine=EngineInfo(BY_TORCH, "", list(archs), [replace(profile, opt=usual)]),
        notes=[NOT_BUILT],
    )
