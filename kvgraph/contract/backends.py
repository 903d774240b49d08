"""Backends: the targets each compiles for, the files it writes, and the sessions that run them.

Code is named as "module:attribute" and imported on first use. A package adds a backend by an entry
point of group `kvgraph.backends`: it has the backend's name and loads its `Backend`. A package
cannot replace a backend of `OURS`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any

from kvgraph.contract.file_names import ENGINE_NAME, ONNX_NAME, PROGRAM_NAME, WEIGHTS_NAME
from kvgraph.errors import KVGraphError, UnsupportedError
from kvgraph.signal_handlers import reraise_if_signalled

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

GROUP = "kvgraph.backends"


@dataclass(frozen=True, slots=True, kw_only=True)
class Runner:
    """A session that runs artifacts: `entry(artifact)` makes the session.

    `threads`: the session computes on the CPU, and `entry(artifact, num_threads)` makes it.
    `require()` raises MissingDependencyError if a package of the session is not installed; a
    compile with a check on the CPU calls it first.
    """

    name: str
    entry: str
    threads: bool = False
    require: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Support:
    """How a backend compiles for one kind of target and runs on it.

    `lower(traced, folder, **options)` writes the backend's files and returns a `Lowered`.
    `options`: keywords that `lower` takes: `archs` of the target, `bounds` of a step (rows, new
    tokens), `progress`, `weight_bits` of packed weights (16, 8, 4, AS_STORED or None). `sessions`:
    the default first. `tools`: distributions whose versions decide the files' bytes.
    `default_because`: why the backend is the target's default; empty for all other backends.

    `float32`: activations are float32 even if the checkpoint has another dtype. `weightless`: the
    checkpoint's weights stay on disk until they are written. `ranks`: it compiles for several
    ranks. `require(plan, archs)` rejects unsupported caches before the model is traced. The check
    of a compile uses two more functions: `rewrite(traced)` only runs the passes, and
    `cut_windows(folder, out, most)` copies an artifact with shorter windows.
    """

    lower: str
    sessions: tuple[Runner, ...]
    tools: tuple[str, ...]
    options: tuple[str, ...] = ()
    default_because: str = ""
    float32: bool = False
    weightless: bool = False
    ranks: bool = False
    require: str = ""
    rewrite: str = ""
    cut_windows: str = ""

    @property
    def is_default(self) -> bool:
        """Whether a compile for such a target has this backend where none is asked for."""
        return bool(self.default_because)


@dataclass(frozen=True, slots=True, kw_only=True)
class Backend:
    """One backend. `targets`: its `Support` by kind of target, "cpu" or "cuda".

    `files`: files that sessions open; an artifact must have them, with their hashes. Every artifact
    has `weights.safetensors`. `packages`: distributions that run its artifacts. `functional`: its
    graphs return the cache's buffers as outputs. `portable`: it compiles for `cuda:portable`.
    """

    name: str
    targets: Mapping[str, Support]
    files: tuple[str, ...]
    packages: tuple[str, ...] = ()
    functional: bool = False
    portable: bool = False


REFERENCE = Runner(name="reference", entry="kvgraph.runtime.sessions.reference:ReferenceSession")
TORCH_TOOLS = ("torch", "transformers")
ONNX_TOOLS = (*TORCH_TOOLS, "onnx", "onnx-ir", "onnxscript")
"""Distributions of the extra `compile` whose versions an artifact names."""

OURS = (
    Backend(
        name="onnx",
        targets={
            "cpu": Support(
                lower="kvgraph.compiler.targets.onnx:lower",
                options=("weight_bits",),
                ranks=True,
                sessions=(
                    Runner(
                        name="onnxruntime",
                        entry="kvgraph.runtime.sessions.onnxruntime:OnnxRuntimeSession",
                        threads=True,
                        require="kvgraph.runtime.sessions.onnxruntime:import_onnxruntime",
                    ),
                    REFERENCE,
                ),
                tools=ONNX_TOOLS,
                default_because="it starts soonest, and runs without torch",
                float32=True,
                weightless=True,
                cut_windows="kvgraph.compiler.check.windows:with_windows_cut",
            ),
            "cuda": Support(
                lower="kvgraph.compiler.targets.onnx_cuda:lower",
                options=("archs", "progress"),
                weightless=True,
                sessions=(
                    Runner(
                        name="onnxruntime",
                        entry="kvgraph.runtime.sessions.onnxruntime_cuda:OnnxRuntimeCudaSession",
                    ),
                    REFERENCE,
                ),
                tools=(*ONNX_TOOLS, "triton"),
                require="kvgraph.compiler.targets.cuda:require_kernels",
            ),
        },
        files=(ONNX_NAME, WEIGHTS_NAME),
        packages=("onnxruntime", "onnxruntime-gpu"),
        functional=True,
    ),
    Backend(
        name="torch",
        targets={
            "cpu": Support(
                lower="kvgraph.compiler.targets.torch:lower",
                options=("weight_bits",),
                ranks=True,
                weightless=True,
                sessions=(
                    Runner(
                        name="torch",
                        entry="kvgraph.runtime.sessions.torch:TorchSession",
                        threads=True,
                    ),
                ),
                tools=TORCH_TOOLS,
            ),
            "cuda": Support(
                lower="kvgraph.compiler.targets.cuda:lower",
                options=("archs", "progress", "weight_bits"),
                ranks=True,
                sessions=(
                    Runner(name="torch", entry="kvgraph.runtime.sessions.torch:cuda_session"),
                ),
                tools=(*TORCH_TOOLS, "triton"),
                default_because="one program for all architectures, replayed as CUDA graphs",
                weightless=True,
                require="kvgraph.compiler.targets.cuda:require_kernels",
                rewrite="kvgraph.compiler.targets.cuda:rewrite",
            ),
        },
        files=(PROGRAM_NAME, WEIGHTS_NAME),
        packages=("torch",),
    ),
    Backend(
        name="tensorrt",
        targets={
            "cuda": Support(
                lower="kvgraph.compiler.targets.tensorrt.lower:lower",
                options=("archs", "bounds", "progress"),
                sessions=(
                    Runner(
                        name="tensorrt",
                        entry="kvgraph.runtime.sessions.tensorrt.session:TensorRTSession",
                    ),
                    REFERENCE,
                ),
                tools=(*ONNX_TOOLS, "triton", "tensorrt-rtx"),
                require="kvgraph.compiler.targets.tensorrt.lower:require_kernels",
            ),
        },
        files=(ENGINE_NAME, ONNX_NAME, WEIGHTS_NAME),
        packages=("tensorrt-rtx", "tensorrt"),
        functional=True,
        portable=True,
    ),
    Backend(
        name="torch-tensorrt",
        targets={
            "cuda": Support(
                lower="kvgraph.compiler.targets.tensorrt.torch_program:lower",
                options=("archs", "bounds", "progress"),
                sessions=(
                    Runner(
                        name="tensorrt",
                        entry="kvgraph.runtime.sessions.tensorrt.session:TensorRTSession",
                    ),
                ),
                tools=(*TORCH_TOOLS, "triton"),
                weightless=True,
                require="kvgraph.compiler.targets.cuda:require_kernels",
            ),
        },
        files=(PROGRAM_NAME, WEIGHTS_NAME),
        packages=("tensorrt", "torch-tensorrt"),
    ),
)
SESSIONS = tuple(
    dict.fromkeys(
        runner.name
        for backend in OURS
        for support in backend.targets.values()
        for runner in support.sessions
    )
)


def default_backend(kind: str) -> Backend:
    """The default backend for a kind of target, "cpu" or "cuda"."""
    return next(each for each in OURS if kind in each.targets and each.targets[kind].is_default)


def find_backend(name: str, kind: str | None = None) -> Backend:
    """Return the backend `name`, of kvgraph or an installed package, with targets of `kind`.

    UnsupportedError lists the known backends, or says what is wrong with a package's backend.
    """
    found = next((each for each in OURS if each.name == name), None) or _installed(name)
    if found is not None and (kind is None or kind in found.targets):
        return found
    ours = [each for each in OURS if kind is None or kind in each.targets]
    ours.sort(key=lambda each: kind is None or not each.targets[kind].is_default)
    others = {point.name for point in _entry_points() if point.name != name}
    known = [*(each.name for each in ours), *sorted(others)]
    where = f" for target {kind}" if kind else ""
    raise UnsupportedError(f"backend: expected one of {known}{where}, got {name!r}")


def imported(entry: str) -> Any:
    """Import and return the object that `entry` names as "module:attribute"."""
    module, _, attribute = entry.partition(":")
    return getattr(import_module(module), attribute)


def _installed(name: str) -> Backend | None:
    """The backend that an installed package adds under `name`."""
    points = [point for point in _entry_points() if point.name == name]
    if not points:
        return None
    if len(points) > 1:
        places = " and ".join(sorted(point.value for point in points))
        raise UnsupportedError(f"backend {name!r}: expected one package to add it, got {places}")
    (point,) = points
    try:
        found = point.load()
    except KVGraphError:
        raise
    except Exception as error:
        reraise_if_signalled(error)
        raise UnsupportedError(
            f"backend {name!r}: expected a Backend from {point.value}, "
            f"got {type(error).__name__}: {error}"
        ) from error
    if not isinstance(found, Backend) or found.name != name:
        raise UnsupportedError(
            f"backend {name!r}: expected a Backend of this name from {point.value}, got {found!r}"
        )
    return found


def _entry_points() -> Sequence[EntryPoint]:
    """Entry points of `GROUP`; read only for names outside `OURS`: that takes tens of ms."""
    from importlib.metadata import entry_points

    return tuple(entry_points(group=GROUP))
