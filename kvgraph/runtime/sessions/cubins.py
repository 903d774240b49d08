"""Loads the kernels of an artifact's folder into this machine's GPU, without a framework."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

from kvgraph.contract.file_names import KERNELS_NAME
from kvgraph.contract.plain import in_short
from kvgraph.errors import ArtifactError, KVGraphError
from kvgraph.kernels.launch import LaunchPlan
from kvgraph.kernels.stored import KernelEntry, archs_of, read_entries, variant_of
from kvgraph.kernels.variants import ALIGNMENT, Parameter, Variant
from kvgraph.ops.cuda_native import Kernel, launcher
from kvgraph.runtime.machine import runnable
from kvgraph.runtime.sessions.cuda_errors import opening_error
from kvgraph.runtime.sessions.opening import opening

MIN_DRIVER = (12, 0)
"""The cubins are assembled by CUDA 12, so any driver of 12.0 or later loads them."""


class Cubins:
    """Kernels by variant name, for the nearest architecture whose kernels all load.

    `folder`: of an artifact; `files`: names in its manifest, as only those are loaded. `ordinal`:
    the GPU. Kernels are loaded into the thread's CUDA context, or the device's primary one.
    ArtifactError with each architecture's reason if none fits; CapacityError if the GPU has too
    little memory; DeviceLostError.
    """

    def __init__(self, folder: Path, files: Collection[str], ordinal: int = 0) -> None:
        self._artifact, self._files = folder, files
        self._folder = folder / "kernels"
        self._launcher = launcher()
        self.multiprocessors = self._launcher.device(ordinal).multiprocessors
        self.arch, self._kernels = self._load(ordinal)

    def require(self, variants: Iterable[Variant]) -> None:
        """Raise ArtifactError unless all `variants` are loaded."""
        for variant in variants:
            if variant.name not in self._kernels:
                raise ArtifactError(
                    f"{self._folder / self.arch}: expected kernel {variant.name} of this kvgraph, "
                    "got none; compile the model again"
                )

    def launch(self, plan: LaunchPlan, addresses: Mapping[str, int], stream: int) -> None:
        """Enqueue `plan`. `addresses` of its operands and of its scratch memory, by name."""
        launch, kernels = self._launcher.launch, self._kernels
        for one in plan.launches:
            given = [addresses[a] if isinstance(a, str) else a for a in one.arguments]
            launch(kernels[one.variant.name], one.grid, given, stream)

    def _load(self, ordinal: int) -> tuple[str, dict[str, Kernel]]:
        archs = archs_of(self._files)
        refusals = []
        for arch in runnable(archs, ordinal):
            try:
                return arch, self._load_arch(arch, ordinal)
            except KVGraphError as error:
                if (told := opening_error(self._folder / arch, str(error))) is not None:
                    raise told from error
                refusals.append(f" ({arch}: {in_short(error)})")
        major, minor = self._launcher.compute_capability(ordinal)
        raise ArtifactError(
            f"{self._folder}: expected kernels that GPU {ordinal} (sm_{major}{minor}) can run, "
            f"got {archs}{''.join(refusals)}"
        )

    def _load_arch(self, arch: str, ordinal: int) -> dict[str, Kernel]:
        folder = self._folder / arch
        with opening(folder / KERNELS_NAME, "kvgraph"):
            entries = read_entries(self._artifact, arch, self._files)
            return {Path(e.file).stem: self._kernel(folder / e.file, e, ordinal) for e in entries}

    def _kernel(self, file: Path, entry: KernelEntry, ordinal: int) -> Kernel:
        variant = variant_of(file, entry)
        module = self._launcher.load(
            file.read_bytes(),
            entry.arch,
            device=ordinal,
            sha256=entry.sha256,
            min_driver=MIN_DRIVER,
        )
        types = [_aligned(parameter) for parameter in variant.parameters]
        return self._launcher.kernel(
            module, entry.entry, types, num_warps=entry.num_warps, shared_bytes=entry.shared
        )


def _aligned(parameter: Parameter) -> str:
    return f"{parameter.type}:{ALIGNMENT}" if parameter.aligned else parameter.type
