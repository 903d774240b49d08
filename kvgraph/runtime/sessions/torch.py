"""TorchSession: an AOTInductor package, with weights bound from the one safetensors file.

The package's runner is created and called directly. `torch._inductor.aoti_load_package` would run a
C++ compiler for seconds to detect the processor's vector extensions, and its model flattens pytrees
for about 12 us a call. Our ops are called through torch's dispatcher and mutate the pool in place.
The package is unpacked here: torch would leave its folder behind if it fails or is killed.
torch keeps the program, and a reference to each weight, for the life of the process.
"""

from __future__ import annotations

import errno
import weakref
import zipfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kvgraph.contract.dims import Array
from kvgraph.contract.file_names import PROGRAM_NAME, WEIGHTS_NAME
from kvgraph.contract.leftovers import scratch
from kvgraph.contract.loading import MEMORY, NOT_MAPPED, next_step, require_package
from kvgraph.contract.plain import in_short
from kvgraph.contract.sizes import size_text
from kvgraph.errors import ArtifactError, KernelError
from kvgraph.ops import native
from kvgraph.ops.torch_threads import fitting_threads
from kvgraph.runtime.folder import ArtifactFolder
from kvgraph.runtime.machine import quota_threads
from kvgraph.runtime.sessions.base import Session
from kvgraph.runtime.sessions.opening import opening
from kvgraph.runtime.sessions.package import require_ops
from kvgraph.runtime.sessions.weights import Stored, read_table, read_weights
from kvgraph.signal_handlers import reraise_if_signalled

OF_LIMITS = (errno.EMFILE, errno.ENFILE, errno.EFBIG, errno.ENOMEM)
"""Error numbers of limits, which no other temporary folder changes."""
OF_NAMES = (errno.ENAMETOOLONG, errno.EISDIR, errno.ENOTDIR, errno.EEXIST, errno.EINVAL)
"""Error numbers of names in the package that no folder takes."""


def _expected(artifact: ArtifactFolder, names: Iterable[str]) -> dict[str, Stored | None]:
    """Dtype and shape of each weight of a package; None if an older compile did not store them."""
    table = read_table(artifact)
    expected = {name: table.get(name) for name in names}
    missing = [name for name, stored in expected.items() if stored is None]
    if table and missing:
        raise ArtifactError(
            f"{artifact.file(PROGRAM_NAME)}: expected {in_short(missing[0])} in its table of "
            "weights, got none; compile the model again"
        )
    return expected


class TorchSession(Session):
    """Runs `model.pt2` on the CPU. `num_threads` sets torch's and the kernels' global pools."""

    mapped = (WEIGHTS_NAME,)

    def __init__(self, artifact: ArtifactFolder, num_threads: int | None = None) -> None:
        super().__init__(artifact)
        torch = import_torch()
        from kvgraph.ops.torch_arrays import tensor_over

        num_threads = fitting_threads(num_threads)
        if not num_threads and (quota := quota_threads()) and quota < torch.get_num_threads():
            num_threads = quota
        self._tensor_over = tensor_over
        self._inference_mode = torch.inference_mode
        if num_threads:
            torch.set_num_threads(num_threads)
        native.set_num_threads(num_threads or 0)
        self._path = path = artifact.file(PROGRAM_NAME)
        with opening(path, f"torch {torch.__version__}"):
            require_ops(artifact)
            with _unpacked(path) as folder:
                runner = torch._C._aoti.AOTIModelPackageLoader(folder, "model", False, 1, -1)
            expected = _expected(artifact, runner.get_constant_fqns())
            weights = read_weights(artifact, expected)
            runner.load_constants(weights, False, True, True)  # user-managed memory
        self._weights = weights
        self._runners = [runner]
        weakref.finalize(self, self._runners.clear)

    def _run(self, arrays: Sequence[Array]) -> npt.NDArray[np.float32]:
        tensors = [
            self._tensor_over(array, symbol.dtype)
            for symbol, array in zip(self.signature.inputs, arrays, strict=True)
        ]
        try:
            with self._inference_mode():  # otherwise autograd handles our ops, 5 us each
                logits: npt.NDArray[np.float32] = self._runners[0].run(tensors)[0].numpy()
        except RuntimeError as error:
            reraise_if_signalled(error)
            raise KernelError(f"torch: {str(error).splitlines()[0]}") from error
        if logits.shape[1:] != (self._vocab,):  # a package does not tell the shape
            raise ArtifactError(
                f"{self._path}: logits: expected {self._vocab} columns from the manifest, got "
                f"{list(logits.shape)}; compile the model again"
            )
        return logits


@contextmanager
def _unpacked(package: Path) -> Iterator[str]:
    """A temporary folder with the files of `package`, in which a library can be loaded.

    ArtifactError if no temporary folder has the room, or allows to run programs.
    """
    place = "TMPDIR"
    with zipfile.ZipFile(package) as files:
        size = size_text(sum(entry.file_size for entry in files.infolist()))
        try:
            with scratch("torch") as folder:
                place = str(folder.parent.parent)
                files.extractall(folder)
                yield str(folder)
        except (OSError, RuntimeError) as error:
            reraise_if_signalled(error)
            why = NOT_MAPPED if isinstance(error, RuntimeError) else error.strerror
            if why is None or why not in str(error) or getattr(error, "errno", 0) in OF_NAMES:
                raise
            step = "set TMPDIR to such a folder"
            if why == NOT_MAPPED:
                step = f"{step}, or {MEMORY}"
            elif isinstance(error, OSError) and error.errno in OF_LIMITS:
                step = next_step(why, step)
            raise ArtifactError(
                f"{place}: expected a temporary folder with room for {size}, in which programs can "
                f"run, got {why!r}; {step}"
            ) from error


def cuda_session(artifact: ArtifactFolder) -> Session:
    """The session of an artifact for CUDA. MissingDependencyError without torch."""
    import_torch()
    from kvgraph.runtime.sessions.cuda import CudaSession

    return CudaSession(artifact)


def import_torch() -> Any:
    torch = require_package("torch", "needed to run this artifact", "pip install 'kvgraph[torch]'")
    from kvgraph.ops import torch_ops  # noqa: F401  (the package calls the registered ops)

    return torch
