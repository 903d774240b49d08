"""Execute the kernels of an artifact's folder as PTX, over small steps of its own shapes.

This checks that the input of ptxas computes correct results. It does not check SASS, ptxas, the
driver, the order of memory between blocks, or speed.
"""

from __future__ import annotations

import gzip
import multiprocessing
import os
import signal
import threading
import zlib
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from multiprocessing.connection import Connection
from pathlib import Path

from kvgraph import ptx
from kvgraph.contract.files import reading
from kvgraph.contract.manifest import ExecutedKernel, Manifest, read_measured, write_manifest
from kvgraph.contract.plain import in_short
from kvgraph.contract.threads import threads_needed
from kvgraph.errors import ArtifactError, KernelError
from kvgraph.kernels import matrix_trials, trials
from kvgraph.kernels.linear_plan import roles_of
from kvgraph.kernels.run_ptx import run_plan
from kvgraph.kernels.shapes import AttentionShape, HeadNorm, PoolShape, Rope
from kvgraph.kernels.stored import StoredKernel, fitting, read_arch
from kvgraph.kernels.trials import Trial
from kvgraph.kernels.variants import (
    EXPERTS_DOWN,
    INCREMENT_CACHE_LENGTHS,
    QUANTIZED_LINEAR,
    RMS_NORM,
    ROUTE,
    SILU_MUL,
    Variant,
)
from kvgraph.signal_handlers import reraise_if_signalled

UNPROVED = (
    "not shown by this: the machine code that ptxas makes of it, the driver, the order of memory "
    "between blocks, and speed"
)
MULTIPROCESSORS = {"decode": 1, "long": 8}
"""Multiprocessors of the device that a trial is planned for: with more of them, the long context of
few rows is split."""

UNITS = tuple(k.name for k in (RMS_NORM, SILU_MUL, ROUTE, INCREMENT_CACHE_LENGTHS))
EXPERTS = EXPERTS_DOWN.name
"""The kernel whose task runs all kernels of a mixture of experts."""
LINEAR = QUANTIZED_LINEAR.name


@dataclass(frozen=True)
class Ran:
    """Result of a kernel in a trial. `error`, `limit`: of the trial, for all its kernels."""

    title: str
    arch: str
    file: str
    trial: str
    error: float
    limit: float
    sectors: int
    ideal_sectors: int
    wavefronts: int
    ideal_wavefronts: int


def tasks_of(kernels: Sequence[StoredKernel]) -> list[tuple[Path, str, str]]:
    """Independent tasks: (folder of an architecture, name of a variant, name of a trial)."""
    tasks = []
    for kernel in kernels:
        with fitting(kernel):
            tasks += [
                (kernel.path.parent, kernel.variant.name, trial) for trial in _trial_names(kernel)
            ]
    return tasks


def _trial_names(kernel: StoredKernel) -> Collection[str]:
    """Names of the trials of a kernel; none if it runs in the trials of another one."""
    if kernel.variant.role == "prefill":
        return trials.rows_of(int(str(kernel.variant.constants["PAGE_SIZE"])))
    if kernel.variant.kernel.name in UNITS:
        return ("one row", "rows")
    if kernel.variant.kernel.name == EXPERTS:
        return (kernel.variant.role,)
    return _linear_trials(kernel) if _stands_for_layer(kernel) else ()


def _stands_for_layer(kernel: StoredKernel) -> bool:
    """Whether this is a linear layer's kernel for the most rows, which defines the whole layer; a
    kernel over parts of the inputs does not show whether there is a bias."""
    if kernel.variant.kernel.name != LINEAR:
        return False
    shape = matrix_trials.linear_shape(kernel.variant)
    return kernel.variant.role == roles_of(shape, kernel.arch)[-1]


def executed(kernels: Sequence[StoredKernel], jobs: int) -> Generator[list[Ran], None, None]:
    """Yield the results of each task, in order; `jobs` other processes run the tasks.

    They end with this process, and when the iterator is closed or raises. KernelError if a kernel
    faults, or if its result differs from the reference.
    """
    with threads_needed():
        from concurrent.futures import ProcessPoolExecutor

    # A fork would have this process's locks without its threads.
    clean = multiprocessing.get_context("spawn")
    theirs, ours = clean.Pipe(duplex=False)
    with (
        theirs,
        ours,
        ProcessPoolExecutor(
            jobs, mp_context=clean, initializer=_end_with, initargs=(theirs,)
        ) as pool,
    ):
        try:
            with threads_needed(), _starts():  # Ctrl-C is for this process: it ends the others
                tasks = [pool.submit(run_task, task) for task in tasks_of(kernels)]
            for task in tasks:  # tasks are not cancelled: the pool's thread would raise an error
                yield task.result()
        except BaseException:
            ours.close()
            raise


def _end_with(pipe: Connection) -> None:
    """End this process, even during a task, when the other end of `pipe` is closed."""

    def wait() -> None:
        pipe.poll(None)
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


@contextmanager
def _starts() -> Iterator[None]:
    """Start processes in this scope: they never get SIGINT, and none is left half started.

    A signal during the scope is handled at its end: a process that has no task yet would print
    that its pipe is closed.
    """
    came: list[int] = []
    handlers = {}
    if threading.current_thread() is threading.main_thread():  # signals only interrupt it
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if signal.getsignal(number) is not None:  # a handler that Python can restore
                handlers[number] = signal.signal(number, lambda number, frame: came.append(number))
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        for number, handler in handlers.items():
            signal.signal(number, handler)
        with ExitStack() as each:  # all handlers run, even if one of them raises
            for caught in reversed(came):
                each.callback(signal.raise_signal, caught)


def record(folder: Path, measured: Manifest, ran: Sequence[Ran]) -> Manifest:
    """Write the kernels' results into the artifact's manifest, atomically.

    ArtifactError, with nothing written, if `folder` no longer has the artifact of `measured`.
    """
    by_file: dict[str, list[Ran]] = {}
    for each in ran:
        by_file.setdefault(each.file, []).append(each)
    entries = [
        ExecutedKernel(
            file=file,
            steps=len(found),
            sectors=sum(r.sectors for r in found),
            ideal_sectors=sum(r.ideal_sectors for r in found),
            wavefronts=sum(r.wavefronts for r in found),
            ideal_wavefronts=sum(r.ideal_wavefronts for r in found),
        )
        for file, found in sorted(by_file.items())
    ]
    manifest = replace(read_measured(folder, measured), executed=entries)
    write_manifest(folder, manifest)
    return manifest


def run_task(task: tuple[Path, str, str]) -> list[Ran]:
    folder, name, which = task
    known = {kernel.variant.name: kernel for kernel in _read_arch(folder)}
    return [ran for trial in _trials(known[name], which, known) for ran in run_trial(trial, known)]


@lru_cache
def _read_arch(folder: Path) -> list[StoredKernel]:
    return read_arch(folder.parents[1], folder.name)


def _trials(kernel: StoredKernel, which: str, known: Mapping[str, StoredKernel]) -> Iterator[Trial]:
    variant = kernel.variant
    with fitting(kernel):
        if variant.kernel.name == EXPERTS:
            others = [each.variant for each in known.values()]
            for shape in matrix_trials.experts_shapes(variant, others):
                yield matrix_trials.experts_trial(shape, kernel.arch, which)
        elif variant.kernel.name == LINEAR:
            yield _linear_trials(kernel)[which]()
        else:
            yield _trial(kernel, which)


def _linear_trials(kernel: StoredKernel) -> dict[str, Callable[[], Trial]]:
    return matrix_trials.linear_trials(matrix_trials.linear_shape(kernel.variant), kernel.arch)


def _trial(kernel: StoredKernel, which: str) -> Trial:
    variant = kernel.variant
    if variant.role != "prefill":
        one, many = trials.rows_trials(variant)
        return one if which == "one row" else many
    shape = _shape(variant)
    rows = trials.rows_of(shape.cache.page_size)[which]
    return trials.attention_trial(shape, kernel.arch, which, rows, MULTIPROCESSORS.get(which, 0))


def _shape(variant: Variant) -> AttentionShape:
    """The shape that an attention's kernels were compiled for."""
    given = dict(variant.constants)
    width = {key: int(str(given[key])) for key in ("HEAD_DIM", "V_HEAD_DIM", "ROTARY")}
    cache = PoolShape(
        variant.dtype,
        variant.pool_dtype,
        int(str(given["KV_HEADS"])),
        width["HEAD_DIM"],
        int(str(given["PAGE_SIZE"])),
        int(str(given["LAYERS"])),
        0 if width["V_HEAD_DIM"] == width["HEAD_DIM"] else width["V_HEAD_DIM"],
        int(str(given["GRANULARITY"])),
    )
    return AttentionShape(
        cache,
        int(str(given["HEADS"])),
        float(str(given["SCALE"])),
        int(str(given["WINDOW"])),
        float(str(given["SOFTCAP"])),
        bool(given["CAUSAL"]),
        bool(given["SINKS"]),
        Rope(width["ROTARY"], bool(given["INTERLEAVED"])) if width["ROTARY"] else None,
        bool(given["CHUNKED"]),
        HeadNorm(float(str(given["EPSILON"])), float(str(given["OFFSET"])))
        if given["NORM"]
        else None,
    )


def run_trial(trial: Trial, known: dict[str, StoredKernel]) -> list[Ran]:
    """Run a trial's launches in order and return their results; KernelError if the trial's output
    differs from the reference."""
    launched: list[StoredKernel] = []

    def kernel(variant: Variant) -> tuple[ptx.Kernel, int]:
        stored = known.get(variant.name)
        if stored is None:
            raise ArtifactError(
                f"{variant.name}: expected among the artifact's kernels, as its plan launches it, "
                "got none"
            )
        launched.append(stored)
        return _parsed(stored), stored.shared

    counted = run_plan(trial.plan, trial.given, kernel, profile=True)
    where, error, limit = trial.error()
    if error > limit:
        last = launched[-1]
        raise KernelError(
            f"{last.title} for {last.arch}, step {trial.name!r}: expected {where} of the reference "
            f"within {limit:.1e}, got an error of {error:.1e}"
        )
    pairs = zip(launched, counted, strict=True)
    return [_ran(stored, counters, trial.name, error, limit) for stored, counters in pairs]


def _ran(
    stored: StoredKernel, counters: ptx.Counters, trial: str, error: float, limit: float
) -> Ran:
    traffic = [*counters.global_reads.values(), *counters.global_writes.values()]
    return Ran(
        stored.title,
        stored.arch,
        f"kernels/{stored.arch}/{stored.variant.name}.cubin",
        trial,
        error,
        limit,
        sum(each.sectors for each in traffic),
        sum(each.ideal for each in traffic),
        counters.wavefronts,
        counters.ideal_wavefronts,
    )


def _parsed(stored: StoredKernel) -> ptx.Kernel:
    return _read_ptx(stored.path, stored.entry, stored.arch)


@lru_cache(maxsize=32)
def _read_ptx(path: Path, entry: str, arch: str) -> ptx.Kernel:
    """Read a kernel from its PTX file; ArtifactError for a damaged file, or one for another
    architecture or entry."""
    try:
        with reading(path, ArtifactError):
            packed = path.read_bytes()
        module = ptx.parse(gzip.decompress(packed).decode())
    except ArtifactError:
        raise
    except (OSError, EOFError, zlib.error, UnicodeDecodeError, KernelError) as error:
        reraise_if_signalled(error)
        raise ArtifactError(
            f"{path}: expected the PTX of {entry}, got {in_short(error)}"
        ) from error
    if module.target.rstrip("af") != arch:
        raise ArtifactError(
            f"{path}: expected PTX for {arch}, got one for {in_short(module.target)}"
        )
    if entry not in module.kernels:
        raise ArtifactError(
            f"{path}: expected entry {entry}, got {in_short(sorted(module.kernels))}"
        )
    return module.kernels[entry]
