"""CUDA artifacts with the PTX of their kernels at their side."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import kvgraph
from kvgraph.compiler.targets import cuda
from kvgraph.kernels.aot import Compiled
from tests.support import artifacts


def with_ptx(model: Path, arch: str, **options: Any) -> Path:
    """A folder of `artifact/`, for torch and `arch`, and of `ptx/`.

    The latter has a text for each cubin, by the cubin's SHA-256.
    """

    def make(folder: Path) -> None:
        texts = folder / "ptx"
        texts.mkdir(parents=True)
        save = cuda.save_kernels

        def save_both(made: Sequence[Compiled], arch: str, out: Path) -> dict[str, float]:
            for kernel in made:
                (texts / f"{hashlib.sha256(kernel.cubin).hexdigest()}.ptx").write_text(kernel.ptx)
            return save(made, arch, out)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(cuda, "save_kernels", save_both)
            kvgraph.compile(
                model, folder / "artifact", target=f"cuda:{arch}", page_size=16, check=False,
                **options,
            )  # fmt: skip

    options["backend"] = "torch"
    what = {"name": f"executed-{model.name}", "model": str(model), "arch": arch, **options}
    return artifacts.made(what, make)
