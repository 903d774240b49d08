"""Errors for files that a framework rejects, or that do not match the manifest."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

from kvgraph.contract.files import require_utf8
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
        why = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
        raise ArtifactError(
            f"{path}: expected a file that {framework} opens, got one that it refuses ({why})"
        ) from error


def require_names(
    path: Path, signature: GraphSignature, inputs: Collection[str], outputs: Collection[str]
) -> None:
    """Raise ArtifactError unless an ONNX model has the manifest's inputs and outputs."""
    named = {
        "inputs": ({symbol.name for symbol in signature.inputs}, set(inputs)),
        "outputs": ({output_name(symbol) for symbol in signature.outputs}, set(outputs)),
    }
    for kind, (expected, found) in named.items():
        if expected != found:
            raise ArtifactError(
                f"{path}: {kind}: expected {sorted(expected)} from the manifest, "
                f"got {sorted(found)}"
            )
