"""The machine of a run: its processors, memory and load."""

from __future__ import annotations

import os
import platform
from pathlib import Path

from kvgraph.contract.devices import first_processor, processors
from kvgraph.errors import RequestError
from kvgraph.runtime.machine import TOPOLOGY, default_threads, memory


def check_threads(threads: int | None) -> int:
    """Return `threads`, or a session's default for None; RequestError if it is more than the
    processors that this process may use."""
    most = len(processors())
    if threads is None:
        return default_threads()
    if not 1 <= threads <= most:
        raise RequestError(
            f"threads: expected 1 to {most} from the processors of this machine, got {threads}"
        )
    return threads


def thread_environment(threads: int) -> dict[str, str]:
    """This process's environment, with the variables from which libraries read thread counts."""
    names = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
    return dict(os.environ) | dict.fromkeys(names, str(threads))


def last_level_cache(topology: Path = TOPOLOGY) -> int:
    """Bytes of the last-level caches of the processors that this process may use; a shared cache
    counts once. 0 if the system does not say."""
    found: dict[str, int] = {}
    for number in processors():
        if caches := _caches(topology / f"cpu{number}"):
            size, sharing = max(caches)
            found[sharing] = size
    return sum(found.values())


def _caches(processor: Path) -> list[tuple[int, str]]:
    """Size in bytes of each cache of a processor, and the processors that share it."""
    found = []
    for path in processor.glob("cache/index*/size"):
        text = path.read_text(encoding="utf-8").strip()
        factor = {"K": 1 << 10, "M": 1 << 20, "G": 1 << 30}.get(text[-1], 1)
        sharing = path.with_name("shared_cpu_list").read_text(encoding="utf-8").strip()
        found.append((int(text.rstrip("KMG")) * factor, sharing))
    return found


def describe() -> dict[str, object]:
    """The machine as plain data: processor and its flags, bytes of memory, system, Python."""
    fields = first_processor()
    return {
        "processor": fields.get("model name") or platform.processor() or platform.machine(),
        "flags": (fields.get("flags") or fields.get("Features") or "").split(),
        "processors": len(processors()),
        "last_level_cache_bytes": last_level_cache(),
        "memory_bytes": memory(),
        "system": platform.platform(),
        "python": platform.python_version(),
    }


def load_average() -> float:
    """Average number of running or runnable processes over the last minute."""
    return os.getloadavg()[0]
