"""Errors for files that a framework rejects, or that do not match the manifest."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeAlias

from kvgraph.contract.dims import TensorType
from kvgraph.contract.files import require_utf8
from kvgraph.contract.loading import with_step
from kvgraph.contract.plain import in_short
from kvgraph.contract.signature import GraphSignature, output_name
from kvgraph.errors import ArtifactError, KVGraphError
from kvgraph.runtime.native_calls import native_call
from kvgraph.runtime.sessions.cuda_errors import opening_error
from kvgraph.signal_handlers import reraise_if_signalled


@contextmanager
def opening(path: Path, framework: str) -> Iterator[None]:
    """Convert errors of `framework` ("torch 2.13.0") while it opens `path` to ArtifactError.

    CapacityError if a GPU has too little memory; DeviceLostError if it is lost."""
    require_utf8(path, framework)
    try:
        with native_call(str(path)):
            yield
    except (KVGraphError, MemoryError):
        raise
    except Exception as error:
        reraise_if_signalled(error)
        if (told := opening_error(path, str(error))) is not None:
            raise told from error
        lines = str(error).strip().splitlines()
        why = in_short(f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__)
        sentence = (
            f"{path}: expected a file that {framework} opens, got one that it refuses ({why})"
        )
        raise ArtifactError(with_step(sentence, why)) from error


Found: TypeAlias = tuple[str, Sequence[int | str | None]]
"""dtype and dims of a graph's input or output; a dim that is no integer is symbolic."""


def require_bindings(
    path: Path,
    signature: GraphSignature,
    inputs: Mapping[str, Found],
    outputs: Mapping[str, Found],
) -> None:
    """Raise ArtifactError unless an ONNX model has the manifest's inputs and outputs: names, dtypes
    and static dims."""
    named = {
        "inputs": ({symbol.name: symbol for symbol in signature.inputs}, inputs),
        "outputs": ({output_name(symbol): symbol for symbol in signature.outputs}, outputs),
    }
    for kind, (expected, found) in named.items():
        if set(expected) != set(found):
            raise ArtifactError(
                f"{path}: {kind}: expected {in_short(sorted(expected))} from the manifest, "
                f"got {in_short(sorted(found))}"
            )
        for name, symbol in expected.items():
            require_type(path, name, symbol, found[name])


def require_type(path: Path, name: str, symbol: TensorType, found: Found) -> None:
    """Raise ArtifactError unless the graph's input or output `name` has the symbol's dtype and
    static dims."""
    dtype, dims = found
    if (symbol.dtype, _static(symbol.shape)) != (dtype, _static(dims)):
        raise ArtifactError(
            f"{path}: {name}: expected {symbol.dtype} {list(symbol.shape)} from the manifest, "
            f"got {in_short(f'{dtype} {list(dims)}')}"
        )


def _static(dims: Sequence[int | str | None]) -> list[int | None]:
    """`dims` with None for symbolic ones; ONNX Runtime gives -1 for one without a name."""
    return [dim if isinstance(dim, int) and dim >= 0 else None for dim in dims]
