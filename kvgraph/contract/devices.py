"""Devices, virtual devices, and the targets that an artifact is compiled for."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import NamedTuple

from kvgraph.contract.values import require_integer, shown
from kvgraph.errors import DeviceError, UnsupportedError
from kvgraph.signal_handlers import ignoring, reraise_if_signalled

CUDA_ARCHS = ("sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120", "sm_121")
CPU_ISAS = ("avx2", "avx512")
NEEDED_FLAGS = ("avx2", "bmi2", "f16c", "fma")
"""Flags that an x86-64 processor must have, as /proc/cpuinfo names them: native code needs them."""

PORTABLE = "portable"
"""Used instead of architectures: an engine's own compiler finishes the code where it runs."""


def code_of(arch: str) -> str:
    """Architecture that Triton compiles `arch` for: "sm_90a" for "sm_90", likewise for newer ones.

    Code for "sm_90a" runs on that compute capability only; code for "sm_80" runs on any 8.x.
    """
    number = arch.removeprefix("sm_")
    return f"{arch}a" if number.isdecimal() and int(number) >= 90 else arch


class LogicalDevice(NamedTuple):
    """Device of a symbol: `HOST`, or (kind, index), the same for virtual and real devices."""

    kind: str
    index: int = 0  # type: ignore[assignment]  # hides tuple.index, which is not needed here

    def __str__(self) -> str:
        return "host" if self.kind == "host" else f"{self.kind}:{self.index}"


HOST = LogicalDevice("host")


def processors() -> list[int]:
    """Numbers of the processors that this process may use; all if the system does not say."""
    with ignoring(AttributeError, OSError):  # macOS, a filter of system calls
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


@cache
def first_processor(path: Path = Path("/proc/cpuinfo")) -> dict[str, str]:
    """Fields of the first processor in `path`, by name; empty if the file cannot be read."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        reraise_if_signalled(error)
        return {}
    pairs = (line.partition(":") for line in text.split("\n\n")[0].splitlines())
    return {name.strip(): value.strip() for name, _, value in pairs}


def require_flags(what: str) -> None:
    """Raise DeviceError, which names `what`, if this processor lacks some of NEEDED_FLAGS.

    A processor of another architecture, or of a system that lists no flags, passes the check.
    """
    flags = first_processor().get("flags")
    missing = [] if flags is None else [f for f in NEEDED_FLAGS if f not in flags.split()]
    if missing:
        raise DeviceError(
            f"{what}: expected a processor with {', '.join(NEEDED_FLAGS)}, got one without "
            f"{', '.join(missing)} (/proc/cpuinfo); use another machine, or, in a virtual "
            "machine, give it the processor of its host"
        )


def parse_logical(text: str) -> LogicalDevice:
    """Inverse of `str(LogicalDevice)`."""
    kind, _, index = text.partition(":")
    return LogicalDevice(kind, int(index or 0))


@dataclass(frozen=True, slots=True)
class Target:
    """A target of code generation: `Target.parse("cpu")`, `"cpu:avx512"`, `"cuda:sm_80,sm_90"`, or
    `"cuda:portable"`, which only engines support."""

    kind: str
    archs: tuple[str, ...] = ()

    @classmethod
    def parse(cls, text: str) -> Target:
        if not isinstance(text, str):
            raise UnsupportedError(f"target: expected text such as 'cpu', got {shown(text)}")
        kind, _, listed = text.partition(":")
        archs = tuple(dict.fromkeys(listed.split(","))) if listed else ()
        known = {"cpu": CPU_ISAS, "cuda": CUDA_ARCHS}.get(kind)
        if known is None:
            raise UnsupportedError(f"target: expected kind cpu or cuda, got {text!r}")
        if kind == "cuda" and archs == (PORTABLE,):
            return cls(kind, archs)
        if (kind == "cuda" and not archs) or not set(archs) <= set(known):
            raise UnsupportedError(f"target {text!r}: expected one of {list(known)} for {kind}")
        return cls(kind, archs)

    def __str__(self) -> str:
        return f"{self.kind}:{','.join(self.archs)}" if self.archs else self.kind


@dataclass(frozen=True, slots=True, init=False)
class Device:
    """`Device("cpu")`, `Device("cuda:0")`, `Device("cuda:0", arch="sm_90", virtual=True)`.

    A virtual device stands for hardware that this machine need not have; `require_memory`
    raises on it, so nothing is ever allocated there.
    """

    kind: str
    index: int
    arch: str | None
    virtual: bool

    def __init__(self, name: str, *, arch: str | None = None, virtual: bool = False) -> None:
        match = re.fullmatch(r"(cpu|cuda)(?::(\d+))?", name) if isinstance(name, str) else None
        if match is None:
            raise UnsupportedError(f"device: expected cpu, cuda or cuda:INDEX, got {name!r}")
        if arch is not None:
            Target.parse(f"{match[1]}:{arch}")
        object.__setattr__(self, "kind", match[1])
        object.__setattr__(self, "index", int(match[2] or 0))
        object.__setattr__(self, "arch", arch)
        object.__setattr__(self, "virtual", virtual)

    @property
    def logical(self) -> LogicalDevice:
        return LogicalDevice(self.kind, self.index)

    def require_memory(self, what: str, nbytes: int) -> None:
        """Raise DeviceError if this device is virtual; `what` is the thing to be allocated."""
        if self.virtual:
            raise DeviceError(
                f"{what}: cannot allocate {nbytes} bytes on virtual device {self}; "
                "a virtual device only describes hardware to compile for"
            )

    def __str__(self) -> str:
        name = self.kind if self.kind == "cpu" and self.index == 0 else f"{self.kind}:{self.index}"
        arch = f"({self.arch})" if self.arch else ""
        return f"virtual {name}{arch}" if self.virtual else name + arch


def virtual_devices(target: str, count: int = 1) -> list[Device]:
    """`count` virtual devices of one target: `virtual_devices("cuda:sm_90", 8)`.

    A target with several architectures gives devices of the first: symbols do not depend on it.
    """
    parsed = Target.parse(target)
    arch = parsed.archs[0] if parsed.archs else None
    count = require_integer("count", count, UnsupportedError, least=1)
    return [Device(f"{parsed.kind}:{i}", arch=arch, virtual=True) for i in range(count)]
