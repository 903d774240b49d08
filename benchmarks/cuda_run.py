"""A run of the CUDA benchmark: the machine, what was found, times, and goals."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from kvgraph.kernels.launch import LaunchPlan

WARM_UP = 0.2
GOALS = {"decode": 0.85, "prefill": 0.8, "step": 0.8}
console = Console(width=110)


@dataclass
class Run:
    """The machine, what was asked for, and what was found."""

    arch: str
    smoke: bool
    folder: Path
    launch: Callable[[LaunchPlan, dict[str, torch.Tensor]], None]
    artifact: Path | None = None
    found: dict[str, Any] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)

    @property
    def device(self) -> str:
        return "cpu" if self.smoke else "cuda"

    def check(self, what: str, holds: bool, said: str = "") -> None:
        console.print(f"{'ok    ' if holds else 'FAILED'} {what} {said}")
        if not holds:
            self.failures.append(what)


def micros(
    run: Run,
    call: Callable[[], object],
    repeats: int = 20,
    *,
    calls: int = 4,
    warm_up: float = WARM_UP,
) -> float:
    """Median microseconds of `call`: of `calls` in a captured graph on a GPU, launches are free."""
    if run.smoke:
        start = time.perf_counter()
        call()
        return (time.perf_counter() - start) * 1e6
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            call()
    return median_us(graph.replay, repeats, warm_up) / calls


def median_us(replay: Callable[[], object], repeats: int, warm_up: float = WARM_UP) -> float:
    """Median microseconds of `replay` on the GPU, warm."""
    pairs = [[torch.cuda.Event(enable_timing=True) for _ in "ab"] for _ in range(repeats)]
    start = time.perf_counter()
    while time.perf_counter() - start < warm_up:  # clocks rise under load
        replay()
        torch.cuda.synchronize()  # else a thousand replays are queued
    for before, after in pairs:
        before.record()
        replay()
        after.record()
    torch.cuda.synchronize()
    times = [float(before.elapsed_time(after)) for before, after in pairs]
    return statistics.median(times) * 1e3


def memory_bandwidth(run: Run) -> float:
    """Bytes per second of the fastest of torch's copy, addition (read and written) and sum (read),
    over buffers beyond any cache. Measured once a run."""
    if (known := run.found.get("bytes_per_s")) is not None:
        return float(known)
    size = (1 << 20) if run.smoke else (4 << 30)
    source = torch.randn(size // 4, device=run.device)
    target = torch.empty_like(source)
    copied = 2 * size / micros(run, lambda: target.copy_(source)) * 1e6
    added = 2 * size / micros(run, lambda: torch.add(source, 1, out=target)) * 1e6
    summed = size / micros(run, source.sum) * 1e6
    console.print(
        f"memory: copy {copied / 1e12:.2f} TB/s, addition {added / 1e12:.2f} (read + written), "
        f"sum {summed / 1e12:.2f} (read)"
    )
    run.found["bytes_per_s"] = found = max(copied, added, summed)
    return found


def wall_ms(call: Callable[[], object], repeats: int = 20) -> float:
    """Median milliseconds of `call` on the host."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        call()
        times.append((time.perf_counter() - start) * 1e3)
    return statistics.median(times)


def goal(run: Run, name: str, share: float | None, where: str) -> None:
    """Print whether the share at `where` reaches the goal of the section `name`."""
    if share is not None and not run.smoke:
        reached = "reached" if share >= GOALS[name] else "NOT reached"
        console.print(f"goal of {name}: {GOALS[name]:.0%} at {where}: {share:.0%}, {reached}")
