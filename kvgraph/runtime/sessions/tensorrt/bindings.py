"""Compares an engine's inputs and outputs with the manifest's."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

from kvgraph.contract.dims import TensorType
from kvgraph.contract.dtypes import DTYPES
from kvgraph.contract.manifest import EngineInfo, ProfileInfo
from kvgraph.contract.signature import output_name
from kvgraph.errors import ArtifactError
from kvgraph.runtime.folder import ArtifactFolder

if TYPE_CHECKING:
    from tensorrt_rtx import ICudaEngine, TensorIOMode


def require_bindings(
    engine: ICudaEngine, trt: ModuleType, artifact: ArtifactFolder, info: EngineInfo, path: Path
) -> frozenset[str]:
    """The names of the inputs that the engine reads on the host.

    ArtifactError at the first input or output that is not the manifest's: name, direction, dtype,
    dims (symbols are dynamic in the engine), memory, alias, and each profile's range.
    """
    found = {engine.get_tensor_name(i) for i in range(engine.num_io_tensors)}
    expected = dict(_expected(artifact, trt, info))
    for name in [*expected, *sorted(found - set(expected))]:
        if (name in found) != (name in expected):
            verb = "an input or output" if name in expected else "no input or output"
            raise ArtifactError(f"{path}: expected {verb} {name!r} from the manifest, got another")
        if name in expected:
            _require_tensor(engine, trt, name, *expected[name], info, path)
    if engine.num_optimization_profiles != len(info.profiles):
        raise ArtifactError(
            f"{path}: expected {len(info.profiles)} optimisation profiles from the manifest, "
            f"got {engine.num_optimization_profiles}"
        )
    for symbol in artifact.signature.inputs:
        for index, profile in enumerate(info.profiles):
            name = info.tensor(symbol.name) or symbol.name
            _require_range(engine, name, symbol, index, profile, path)
    host = trt.TensorLocation.HOST
    names = (symbol.name for symbol in artifact.signature.inputs)
    return frozenset(n for n in names if engine.get_tensor_location(info.tensor(n)) == host)


def _expected(
    artifact: ArtifactFolder, trt: ModuleType, info: EngineInfo
) -> Iterator[tuple[str, tuple[TensorType, TensorIOMode]]]:
    modes = trt.TensorIOMode
    for symbol in artifact.signature.inputs:
        yield info.tensor(symbol.name) or symbol.name, (symbol, modes.INPUT)
    for symbol in artifact.signature.outputs:
        name = info.tensor(output_name(symbol))
        if name is not None:
            yield name, (symbol, modes.OUTPUT)


def _require_tensor(
    engine: ICudaEngine,
    trt: ModuleType,
    name: str,
    symbol: TensorType,
    mode: TensorIOMode,
    info: EngineInfo,
    path: Path,
) -> None:
    aliased = getattr(engine, "get_aliased_input_tensor", lambda _: None)(name)
    is_buffer_out = symbol.kind == "buffer" and mode == trt.TensorIOMode.OUTPUT
    facts = [
        ("a tensor that is", mode, engine.get_tensor_mode(name)),
        (
            "dtype",
            getattr(trt.DataType, DTYPES[symbol.dtype].tensorrt),
            engine.get_tensor_dtype(name),
        ),
        ("format", trt.TensorFormat.LINEAR, engine.get_tensor_format(name)),
        # An engine that does not report the manifest's alias still gets one address for both.
        ("an alias of", (symbol.name if is_buffer_out else None) if aliased else aliased, aliased),
    ]
    if symbol.device.kind != "host":
        facts.append(("memory", trt.TensorLocation.DEVICE, engine.get_tensor_location(name)))
    for what, wanted, given in facts:
        if wanted != given:
            raise ArtifactError(
                f"{path}: {name}: expected {what} {_word(wanted)} from the manifest, "
                f"got {_word(given)}"
            )
    dims = tuple(engine.get_tensor_shape(name))
    if len(dims) != symbol.rank or not all(
        _dim_fits(symbol, axis, extent, info) for axis, extent in enumerate(dims)
    ):
        raise ArtifactError(
            f"{path}: {name}: expected dims {list(symbol.shape)} from the manifest, got "
            f"{list(dims)} (-1 is symbolic)"
        )


def _dim_fits(symbol: TensorType, axis: int, extent: int, info: EngineInfo) -> bool:
    """Whether a dim fits: a symbol is dynamic, or has the extent that every profile pins it to."""
    dim = symbol.shape[axis]
    if isinstance(dim, int) or extent == -1:
        return extent == (-1 if isinstance(dim, str) else dim)
    pinned = {
        symbol.extents(sizes)[axis] for each in info.profiles for sizes in (each.min, each.max)
    }
    return pinned == {extent}


def _require_range(
    engine: ICudaEngine,
    name: str,
    symbol: TensorType,
    index: int,
    profile: ProfileInfo,
    path: Path,
) -> None:
    found = [tuple(dims) for dims in engine.get_tensor_profile_shape(name, index)]
    wanted = [symbol.extents(sizes) for sizes in (profile.min, profile.opt, profile.max)]
    if found != wanted:
        raise ArtifactError(
            f"{path}: {name}: expected shapes {wanted} in profile {profile.name!r} of the "
            f"manifest, got {found}"
        )


def _word(value: object) -> str:
    return str(getattr(value, "name", value))
