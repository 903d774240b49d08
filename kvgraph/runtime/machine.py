"""Checks that this machine can run an artifact, and chooses the number of threads."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from kvgraph.contract.devices import CUDA_ARCHS, PORTABLE, Target, code_of, processors
from kvgraph.contract.plain import in_short
from kvgraph.contract.values import require_integer
from kvgraph.errors import ArtifactError, DeviceError, KVGraphError, RequestError, UnsupportedError
from kvgraph.ops.cuda_native import launcher
from kvgraph.signal_handlers import ignoring, reraise_if_signalled

TOPOLOGY = Path("/sys/devices/system/cpu")
CGROUPS, OWN_CGROUPS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def require_machine(target: str, where: str) -> None:
    """Raise ArtifactError, with both values, unless this machine can run `target`."""
    try:
        parsed = Target.parse(target)
    except UnsupportedError as error:
        raise ArtifactError(f"{where}: {in_short(error)}") from error
    if parsed.kind == "cuda":
        _require_gpu(parsed.archs, target, where)
    elif target != "cpu":
        raise ArtifactError(
            f"{where}: target: expected 'cpu' from this machine's sessions, got {target!r}"
        )


def runnable(archs: Sequence[str], ordinal: int = 0) -> list[str]:
    """The `archs` that GPU `ordinal` can run, best match first. DeviceError: no GPU."""
    driver = launcher()
    major, minor = driver.compute_capability(ordinal)
    found = [arch for arch in archs if _runs(arch, ordinal)]
    return sorted(found, key=lambda arch: (arch == f"sm_{major}{minor}", _number(arch)))[::-1]


def require_threads(asked: int | None) -> None:
    """Raise RequestError for more threads than processors that this process may run on."""
    most = len(processors())
    if asked is not None and not 0 <= require_integer("num_threads", asked, RequestError) <= most:
        raise RequestError(f"num_threads: expected 0 to {most} from this machine, got {asked}")


def default_threads(topology: Path = TOPOLOGY) -> int:
    """Number of physical cores that this process may run on, bounded by its CPU quota.

    Two threads on a core share its vector units, and one that waits delays all others. A processor
    without topology information counts as one core.
    """
    cores = {_core(topology / f"cpu{number}", number) for number in processors()}
    return min(len(cores), quota_threads() or len(cores))


def quota_threads(cgroups: Path = CGROUPS, own: Path = OWN_CGROUPS) -> int | None:
    """Processors' worth of CPU time that the control groups grant the process, rounded up (a
    container's `--cpus`). None: no bound, or one above the processors that it may run on.

    Read from `cpu.max` (cgroup v2) or `cpu.cfs_quota_us` (v1): Linux, admin-guide/cgroup-v2 and
    scheduler/sched-bwc.
    """
    found = [each for group in _groups("cpu", cgroups, own) for each in _granted(group)]
    least = math.ceil(min(found)) if found else None
    return least if least is not None and least < len(processors()) else None


def memory_limit(cgroups: Path = CGROUPS, own: Path = OWN_CGROUPS) -> int | None:
    """Bytes of memory that the control groups grant the process (a container's `--memory`). None:
    no bound.

    Read from `memory.max` (cgroup v2) or `memory.limit_in_bytes` (v1): Linux, admin-guide/cgroup-v2
    and cgroup-v1/memory.
    """
    found: list[int] = []
    for group in _groups("memory", cgroups, own):
        for name in ("memory.max", "memory.limit_in_bytes"):
            with ignoring(OSError, ValueError):  # none, or "max"
                found.append(int((group / name).read_text(encoding="utf-8")))
    return min(found, default=None)


def memory(cgroups: Path = CGROUPS, own: Path = OWN_CGROUPS) -> int:
    """Bytes of memory of the machine, or of the container if its limit is lower."""
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = memory_limit(cgroups, own)
    return whole if limit is None else min(whole, limit)


def _groups(controller: str, cgroups: Path, own: Path) -> Iterator[Path]:
    """Yield the folders of the control groups in which `controller` bounds the process."""
    with ignoring(OSError, ValueError):
        for line in own.read_text(encoding="utf-8").splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers and controller not in controllers.split(","):
                continue
            root = cgroups / controller if controllers else cgroups
            for folder in (root / path.strip("/"), *(root / path.strip("/")).parents):
                if folder.is_relative_to(root):
                    yield folder


def _granted(group: Path) -> Iterator[float]:
    """Yield the group's quota in processors, if it has one."""
    with ignoring(OSError, ValueError):
        quota, period = (group / "cpu.max").read_text(encoding="utf-8").split()
        if quota != "max":
            yield int(quota) / int(period)
    with ignoring(OSError, ValueError):
        quota, period = (
            (group / f"cpu.cfs_{name}_us").read_text(encoding="utf-8")
            for name in ("quota", "period")
        )
        if int(quota) > 0:
            yield int(quota) / int(period)


def _require_gpu(archs: Sequence[str], target: str, where: str) -> None:
    try:
        driver = launcher()
        if not driver.device_count():
            raise DeviceError("the driver has no device")
        major, minor = driver.compute_capability()
        found = archs if tuple(archs) == (PORTABLE,) else runnable(archs)
    except KVGraphError as error:
        raise ArtifactError(
            f"{where}: target: expected an NVIDIA GPU for {target!r} from this machine, "
            f"got none ({_reason(error)})"
        ) from error
    if not found:
        raise ArtifactError(
            f"{where}: target: expected code for sm_{major}{minor} of this machine's GPU, "
            f"got {target!r}{_why(archs)}{_remedy()}"
        )


def _reason(error: KVGraphError) -> str:
    """The reason in parentheses of an error about a missing driver; else the whole message."""
    _, has_reason, reason = str(error).partition(", got none (")
    return reason.removesuffix(")") if has_reason else str(error)


def _runs(arch: str, ordinal: int) -> bool:
    try:
        launcher().check_arch(code_of(arch), ordinal)
    except DeviceError:
        return False
    return True


def _why(archs: Sequence[str]) -> str:
    """The driver's error for the newest architecture: it tells an old driver from another GPU."""
    try:
        launcher().check_arch(code_of(max(archs, key=_number)))
    except DeviceError as error:
        return f" ({error})"
    return ""


def _remedy() -> str:
    """A hint of a target that this machine's GPU and driver can run; empty if there is none."""
    found = runnable(CUDA_ARCHS)
    return f"; compile with --target cuda:{found[0]}" if found else ""


def _number(arch: str) -> int:
    return int(arch.removeprefix("sm_"))


def _core(folder: Path, number: int) -> str:
    try:
        return (folder / "topology" / "thread_siblings_list").read_text(encoding="utf-8").strip()
    except OSError as error:
        reraise_if_signalled(error)
        return f"processor {number}"
