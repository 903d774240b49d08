"""Build an engine from an artifact's graph, weights and plugins on this machine.

It is for artifacts of backend tensorrt, if this machine has another TensorRT than the compiling
one, and of backend torch-tensorrt, which have no engine: an enterprise TensorRT builds for the GPU
of its own machine. All files are copied, except the engine and, for other architectures, kernels.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import json
import shutil
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from kvgraph.compiler import emit
from kvgraph.compiler.alone import alone
from kvgraph.compiler.output import require_free, settle_leftovers, staging
from kvgraph.compiler.pipeline import require_tools
from kvgraph.compiler.targets.tensorrt import engine as trt_engine
from kvgraph.compiler.targets.tensorrt.engine import (
    BY_TORCH,
    ENTERPRISE,
    INSTALL,
    NOT_BUILT,
    RTX,
)
from kvgraph.contract.devices import PORTABLE, Target
from kvgraph.contract.file_names import ENGINE_NAME
from kvgraph.contract.files import as_path, reading
from kvgraph.contract.manifest import (
    MANIFEST_NAME,
    EngineInfo,
    Manifest,
    read_manifest,
    write_manifest,
)
from kvgraph.contract.plain import from_plain
from kvgraph.errors import ArtifactError, BindingError, MissingDependencyError, UnsupportedError
from kvgraph.progress import Progress
from kvgraph.rebuild.described import describing
from kvgraph.runtime.artifact import verify

TOOLS = ("torch", "onnx", "onnx-ir")
"""Distributions that `kvgraph.compiler.targets.tensorrt.lower` imports."""


def rebuild(
    artifact: str | Path,
    out: str | Path,
    *,
    target: str | None = None,
    force: bool = False,
    progress: Progress = lambda stage: None,
) -> Manifest:
    """Write an artifact like `artifact` into `out`, with an engine of this machine's TensorRT.

    The engine has the profiles of the artifact's engine. `out` appears whole or not at all.
    `target`: default: this machine's GPU for an enterprise TensorRT, else the artifact's target.
    ArtifactError: `artifact` is damaged or not for TensorRT. MissingDependencyError: TensorRT,
    torch or onnx is not installed.
    """
    require_tools(TOOLS)
    folder, out = as_path("artifact", artifact), as_path("out", out)
    settle_leftovers(out)
    manifest = read_manifest(folder)
    if manifest.backend not in ("tensorrt", "torch-tensorrt"):
        raise ArtifactError(
            f"{folder}: backend: expected 'tensorrt' or 'torch-tensorrt' to build an engine from, "
            f"got {manifest.backend!r}"
        )
    old = manifest.engine
    if old is None or not old.profiles:
        raise ArtifactError(f"{folder}: engine: expected what built it and its profiles, got none")
    _require_profiles(folder, manifest, old)
    require_free(out, force=force)
    by_torch = manifest.backend == "torch-tensorrt"
    module = BY_TORCH if by_torch else _module()
    version = _torch_version() if by_torch else trt_engine.require_module(module)
    with alone():  # it may be the first to import torch
        archs = _archs(module, target, manifest)
    progress("hashing")
    verify(folder)
    with alone(), staging(out, force=force) as made:
        _copy(folder, made, manifest)
        _provide_kernels(made, archs, manifest.dtype, progress)
        progress(f"building the engine with {module} {version}")
        if by_torch:
            engine = _torch_engine(folder, made, archs, manifest, old)
        else:
            fixed = [] if archs == (PORTABLE,) else list(archs)
            engine = trt_engine.build_engine(
                made, manifest.signature, old.profiles, fixed, module=module
            )
        files = emit.hash_all(made)
        kept = [name for name, entry in files.items() if manifest.files.get(name) == entry]
        rebuilt = replace(
            manifest,
            target=str(Target("cuda", archs)),
            engine=engine,
            files=files,
            executed=[each for each in manifest.executed if each.file in kept],
            tools={**manifest.tools, module.replace("_", "-"): version},
            nondeterministic_files=sorted({*manifest.nondeterministic_files, ENGINE_NAME}),
            notes=[note for note in manifest.notes if note != NOT_BUILT],
        )
        write_manifest(made, rebuilt)
    return rebuilt


def _require_profiles(folder: Path, manifest: Manifest, engine: EngineInfo) -> None:
    """Raise ArtifactError, which names the manifest, for a profile that does not fit the inputs."""
    for profile in engine.profiles:
        try:
            manifest.signature.to_tensorrt_profile(profile.min, profile.opt, profile.max)
        except BindingError as error:
            raise ArtifactError(
                f"{folder / MANIFEST_NAME}: engine: profile {profile.name!r}: {error}"
            ) from error


def _torch_version() -> str:
    if importlib.util.find_spec(BY_TORCH) is None:
        raise MissingDependencyError(
            "--from-artifact: expected torch-tensorrt to build an engine with, found none; "
            "pip install 'kvgraph[torch-tensorrt]' (with the CUDA build of torch that it asks for)"
        )
    for name in ("torch-tensorrt", "torch-tensorrt-rtx"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(name)
    return "of no package"


def _torch_engine(
    folder: Path, made: Path, archs: Sequence[str], manifest: Manifest, old: EngineInfo
) -> EngineInfo:
    """Build a torch-tensorrt engine with one profile in the folder `made`, with its kernels."""
    from kvgraph.rebuild.torch_engine import TorchRequest, TorchResult

    profile = old.profiles[-1]
    sizes = (profile.min, profile.opt, profile.max)
    request = TorchRequest(
        artifact=str(folder),
        kernels=str(made / "kernels"),
        engine=str(made / ENGINE_NAME),
        profile=manifest.signature.to_tensorrt_profile(*sizes),
    )
    builder = "kvgraph.rebuild.torch_engine"
    result = TorchResult(**trt_engine.run_builder(builder, asdict(request), BY_TORCH))
    return EngineInfo(result.module, result.version, list(archs), [profile], names=result.names)


def _module() -> str:
    """Name of the installed TensorRT module: an enterprise TensorRT, else TensorRT-RTX.

    MissingDependencyError if there is none.
    """
    for name in (ENTERPRISE, RTX):
        if importlib.util.find_spec(name) is not None:
            return name
    raise MissingDependencyError(
        f"--from-artifact: expected {ENTERPRISE} or {RTX} to build an engine with, found neither; "
        f"{INSTALL[ENTERPRISE]} (for this machine's GPU) or {INSTALL[RTX]}"
    )


def _archs(module: str, target: str | None, manifest: Manifest) -> tuple[str, ...]:
    """Architectures of the engine: those of `target`, of this machine's GPU, or of the artifact."""
    from kvgraph.compiler.targets.tensorrt.lower import kernel_archs

    if module in (ENTERPRISE, BY_TORCH):
        from kvgraph.ops.cuda_native import launcher

        mine = "sm_{}{}".format(*launcher().compute_capability())
        if target not in (None, f"cuda:{mine}"):
            raise UnsupportedError(
                f"target: expected cuda:{mine}, this machine's GPU, which {module} builds for, "
                f"got {target!r}"
            )
        return (mine,)
    parsed = Target.parse(target or manifest.target)
    if parsed.kind != "cuda":
        raise UnsupportedError(f"target: expected kind cuda for backend tensorrt, got {target!r}")
    kernel_archs(parsed.archs, manifest.dtype)
    return parsed.archs


def _copy(folder: Path, made: Path, manifest: Manifest) -> None:
    for name in manifest.files:
        if name not in (ENGINE_NAME, MANIFEST_NAME):
            (made / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(folder / name, made / name)


def _provide_kernels(folder: Path, archs: Sequence[str], dtype: str, progress: Progress) -> None:
    """Keep the artifact's kernels if they are for `archs`; else compile kernels with Triton."""
    from kvgraph.compiler.targets.tensorrt import lower

    kernels = folder / "kernels"
    wanted = lower.kernel_archs(archs, dtype) if archs == (PORTABLE,) else tuple(archs)
    with describing(kernels) as path:
        with reading(path, ArtifactError):
            present = {each.name for each in kernels.iterdir() if each.is_dir()}
            described = json.loads(path.read_text(encoding="utf-8"))
        shapes = dict(enumerate(map(lower.shape_of, described["shapes"])))
        places = from_plain(dict[str, int], described["nodes"], "nodes")
        nodes = {name: shapes[index] for name, index in places.items()}
    if set(wanted) <= present:
        return
    shutil.rmtree(kernels)
    lower.write_kernels(nodes, wanted, folder, progress)
