"""Build an artifact's engine from its graph and kernels in another process, and check it."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from kvgraph.compiler.targets.tensorrt.build import BuildRequest, Result
from kvgraph.contract.dims import (
    BATCH_SIZE,
    MAX_NUM_PAGES,
    NUM_LOGITS,
    NUM_PAGE_SLOTS,
    NUM_STEPS,
    TOTAL_SEQ_LEN,
    ceildiv,
)
from kvgraph.contract.file_names import ENGINE_NAME, LIBRARY_NAME, ONNX_NAME
from kvgraph.contract.manifest import EngineInfo, ProfileInfo
from kvgraph.contract.signature import GraphSignature, output_name
from kvgraph.contract.versions import version_of
from kvgraph.errors import MissingDependencyError, UnsupportedError

BUILDER = "kvgraph.compiler.targets.tensorrt.build"
BY_TORCH = "torch_tensorrt"
NOT_BUILT = (
    "engine: none yet; on the machine that runs it, with torch-tensorrt: "
    "kvgraph compile --from-artifact THIS -o HERE"
)
"""Note in the manifest of an artifact for torch-tensorrt."""

RTX, ENTERPRISE = "tensorrt_rtx", "tensorrt"
OLDEST = {RTX: (1, 7, 1), ENTERPRISE: (10, 3, 0)}
"""Oldest versions. Older TensorRT-RTX needs a GPU to build; older TensorRT has no aliased plugin
outputs."""

DISTRIBUTIONS = {RTX: "tensorrt-rtx", ENTERPRISE: "tensorrt"}
INSTALL = {RTX: "pip install 'kvgraph[tensorrt]'", ENTERPRISE: "pip install tensorrt"}

PROFILE_STEPS = 64
"""Most rows of `max_lengths` in a profile."""

MAX_PAGE_SLOTS = 1 << 20
"""Most pages of a pool in a profile."""


def require_module(name: str) -> str:
    """Return the version of TensorRT module `name`.

    MissingDependencyError, with the install command, if it is missing or too old.
    """
    wanted = ".".join(map(str, OLDEST[name]))
    if importlib.util.find_spec(name) is None:
        raise MissingDependencyError(
            f"backend tensorrt: {name} {wanted} or newer is needed to build an engine, not "
            f"installed; {INSTALL[name]}"
        )
    version = version_of(DISTRIBUTIONS[name])
    found = tuple(int(part) for part in version.split(".")[:3] if part.isdecimal())
    if found < OLDEST[name]:
        raise MissingDependencyError(
            f"backend tensorrt: expected {name} {wanted} or newer, found {version}; {INSTALL[name]}"
        )
    return version


# ---- profiles -----------------------------------------------------------------------------------


def profiles_of(
    signature: GraphSignature, max_seq_len: int, max_batch_size: int, max_batch_tokens: int
) -> list[ProfileInfo]:
    """Two profiles: "decode" for one new token a row, and "prefill" for any step.

    `max_batch_size`: most rows of a step. `max_batch_tokens`: most new tokens of a step.
    """
    names = {dim for symbol in signature.inputs for dim in symbol.symbolic_dims}
    tokens = min(max_batch_tokens, max_batch_size * max_seq_len)
    width = ceildiv(max_seq_len, _page_size(signature))
    ranges = {BATCH_SIZE: max_batch_size, NUM_LOGITS: max_batch_size, NUM_STEPS: PROFILE_STEPS}
    ranges |= {n: MAX_PAGE_SLOTS for n in names if n.endswith(NUM_PAGE_SLOTS)}
    ranges |= {n: width for n in names if n.endswith(MAX_NUM_PAGES)}
    return [
        _profile("decode", ranges | {TOTAL_SEQ_LEN: max_batch_size}),
        _profile("prefill", ranges | {TOTAL_SEQ_LEN: tokens}),
    ]


def _page_size(signature: GraphSignature) -> int:
    """Tokens of a page; equal in all leaves."""
    extent = signature.buffers[0].shape[3]
    assert isinstance(extent, int)
    return extent


def _profile(name: str, most: Mapping[str, int]) -> ProfileInfo:
    best = {BATCH_SIZE: 8, NUM_LOGITS: 8, TOTAL_SEQ_LEN: 8 if name == "decode" else 512}
    least = {dim: 2 if dim.endswith(NUM_PAGE_SLOTS) else 1 for dim in most}
    usual = {dim: min(best.get(dim, least[dim]), extent) for dim, extent in most.items()}
    usual |= {dim: max(extent // 4, 1) for dim, extent in most.items() if _of_pages(dim)}
    ordered = sorted(most)
    return ProfileInfo(
        name,
        {dim: least[dim] for dim in ordered},
        {dim: usual[dim] for dim in ordered},
        {dim: most[dim] for dim in ordered},
    )


def _of_pages(dim: str) -> bool:
    return dim.endswith((NUM_PAGE_SLOTS, MAX_NUM_PAGES))


# ---- the build ----------------------------------------------------------------------------------


def build_engine(
    folder: Path,
    signature: GraphSignature,
    profiles: Sequence[ProfileInfo],
    archs: Sequence[str],
    *,
    module: str = RTX,
    aliased: bool = True,
    log: Path | None = None,
) -> EngineInfo:
    """Write `model.engine` into an artifact's folder that has the graph, kernels and plugins.

    `archs`: GPU architectures; empty: an engine without a fixed architecture.
    `aliased`: declare each layer's pool output as an alias of its input; else all layers use the
    graph's pool. `log`: file for all of TensorRT's messages.
    UnsupportedError: TensorRT or a plugin refuses, with its message; then no engine is written.
    """
    version = require_module(module)
    chosen = list(archs) if module == RTX else []  # other TensorRT builds for its machine's GPU
    request = BuildRequest(
        module=module,
        model=str(folder / ONNX_NAME),
        kernels=str(folder / "kernels"),
        library=str(folder / LIBRARY_NAME),
        engine=str(folder / ENGINE_NAME),
        archs=chosen,
        profiles=[
            signature.to_tensorrt_profile(profile.min, profile.opt, profile.max)
            for profile in profiles
        ],
        aliased=aliased,
        verbose=log is not None,
    )
    try:
        result = Result(**run_builder(BUILDER, asdict(request), request.module, log))
        _require_bindings(result, signature)
    except BaseException:
        Path(request.engine).unlink(missing_ok=True)
        raise
    return EngineInfo(module, version, list(archs), list(profiles))


def run_builder(
    builder: str, request: Mapping[str, object], module: str, log: Path | None = None
) -> dict[str, Any]:
    """The answer of `python -m builder` to a request, run in a process that finds the libraries of
    `module`. UnsupportedError if it refuses, aborts or is killed."""
    with tempfile.TemporaryDirectory(prefix="kvgraph-tensorrt.") as scratch:
        path = Path(scratch, "build.json")
        path.write_text(json.dumps(request), encoding="utf-8")
        said = log or Path(scratch, "log")
        with said.open("wb") as output:
            done = subprocess.run(
                [sys.executable, "-m", builder, str(path)],
                env=_environment(module, Path(scratch)),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )
        answer = path.with_suffix(".result")
        if not answer.exists():
            raise UnsupportedError(_ended(done.returncode, said))
        found: dict[str, Any] = json.loads(answer.read_text(encoding="utf-8"))
    if "refused" in found:
        raise UnsupportedError(found["refused"])
    return found


def _environment(module: str, folder: Path) -> dict[str, str]:
    """Environment in which the parser finds TensorRT's library under its plain name.

    A wheel has only libtensorrt_rtx.so.1, so links with the plain names are made in `folder`.
    Without these the parser aborts at a plugin.
    """
    spec = importlib.util.find_spec(f"{module}_libs")
    for place in (spec.submodule_search_locations or []) if spec else []:
        for library in Path(place).glob("*.so.*"):
            plain = folder / (library.name.partition(".so")[0] + ".so")
            if not plain.exists():
                plain.symlink_to(library)
    inherited = dict(os.environ)
    searched = [str(folder), *filter(None, [inherited.get("LD_LIBRARY_PATH")])]
    return inherited | {"LD_LIBRARY_PATH": ":".join(searched)}


def _ended(code: int, log: Path) -> str:
    """Text for why there is no answer: the signal or exit code, and the last line of the log."""
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
    lines = [
        line
        for line in log.read_text(errors="replace", encoding="utf-8").splitlines()
        if line.strip()
    ]
    last = f", after {lines[-1].strip()[:200]!r}" if lines else ""
    return f"backend tensorrt: expected an engine, but the process that builds it {how}{last}"


def _require_bindings(result: Result, signature: GraphSignature) -> None:
    """Raise UnsupportedError unless the engine's inputs and outputs match the signature."""
    outputs = [symbol.renamed(output_name(symbol)) for symbol in signature.outputs]
    for symbols, found in ((signature.inputs, result.inputs), (outputs, result.outputs)):
        expected = {s.name: [d if isinstance(d, int) else -1 for d in s.shape] for s in symbols}
        if list(found.items()) != list(expected.items()):
            raise UnsupportedError(f"engine: expected {expected} from the signature, got {found}")
