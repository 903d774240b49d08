"""The machine that figures are from: its processors, memory and load."""

from __future__ import annotations

import os
import platform
from pathlib import Path

from kvgraph.errors import RequestError

CACHES = Path("/sys/devices/system/cpu/cpu0/cache")


def processors() -> int:
    """That this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def check_threads(threads: int | None) -> int:
    """`threads`, or all processors; RequestError beyond those that this process may use."""
    most = processors()
    if threads is None:
        return most
    if not 1 <= threads <= most:
        raise RequestError(
            f"threads: expected 1 to {most} from the processors of this machine, got {threads}"
        )
    return threads


def thread_environment(threads: int) -> dict[str, str]:
    """This process's environment, with the thread counts that libraries read at their start."""
    names = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
    return dict(os.environ) | dict.fromkeys(names, str(threads))


def last_level_cache() -> int:
    """Bytes of processor 0's largest cache; 0 where the system does not say."""
    sizes = [0]
    for path in CACHES.glob("index*/size"):
        text = path.read_text().strip()
        factor = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}.get(text[-1], 1)
        sizes.append(int(text.rstrip("KMG")) * factor)
    return max(sizes)


def describe() -> dict[str, object]:
    """Plain data: model and flags of the processor, memory in bytes, system, Python."""
    fields = _first_processor()
    return {
        "processor": fields.get("model name") or platform.processor() or platform.machine(),
        "flags": (fields.get("flags") or fields.get("Features") or "").split(),
        "processors": processors(),
        "last_level_cache_bytes": last_level_cache(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "system": platform.platform(),
        "python": platform.python_version(),
    }


def load_average() -> float:
    """Processes that ran or wanted to, over the last minute."""
    return os.getloadavg()[0]


def _first_processor() -> dict[str, str]:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return {}
    block = text.split("\n\n")[0]
    pairs = (line.partition(":") for line in block.splitlines())
    return {name.strip(): value.strip() for name, _, value in pairs}
