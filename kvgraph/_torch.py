"""Registers kvgraph's ops and its record classes (as pytrees) with torch.

A program of torch.export that names our ops loads after `import kvgraph`, in either order of the
two imports, and `import kvgraph` alone imports no framework. Decision: an import finder waits for
the import of torch. A torch entry point would instead run at every start of torch, also in
processes that never import kvgraph, and its failure would be reported as torch's.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from importlib.abc import Loader
    from importlib.machinery import ModuleSpec
    from types import ModuleType
from kvgraph.signal_handlers import reraise_if_signalled


def register_with_torch() -> None:
    """Register now if torch is imported, else right after its import. Repeated calls are safe."""
    if sys.modules.get("torch") is not None:
        _register()
    elif not any(isinstance(finder, _TorchFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _TorchFinder())


class _TorchFinder:
    """Import finder that wraps torch's loader, and removes itself once torch is imported."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != "torch":
            return None
        others = [finder for finder in sys.meta_path if finder is not self]
        specs = (finder.find_spec(name, path, target) for finder in others)
        spec = next((spec for spec in specs if spec is not None), None)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, self._imported)  # type: ignore[assignment]
        return spec

    def _imported(self) -> None:
        sys.meta_path.remove(self)
        _register()


class _Loader:
    """Wraps another finder's loader, and calls `then` after the module has executed."""

    def __init__(self, loader: Loader, then: Callable[[], None]) -> None:
        self._loader = loader
        self._then = then

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        module.__spec__.loader = module.__loader__ = self._loader
        self._loader.exec_module(module)
        self._then()

    def __getattr__(self, name: str) -> object:
        return getattr(self._loader, name)


def _register() -> None:
    """Register the ops. On failure warn only: torch stays importable, users of the ops fail."""
    try:
        from kvgraph.ops import torch_fusions, torch_ops, torch_pytrees  # noqa: F401
    except Exception as error:
        reraise_if_signalled(error)
        version = getattr(sys.modules["torch"], "__version__", "of an unknown version")
        warnings.warn(
            f"kvgraph: its ops are not registered with torch {version}: {error}", stacklevel=2
        )
