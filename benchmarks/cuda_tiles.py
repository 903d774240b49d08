"""Tiles of linear layers over small weights, swept on one GPU: what `matrix_tiles` keeps.

    python -m benchmarks.cuda_tiles --compile FOLDER [--arch sm_90]     # needs no GPU
    python -m benchmarks.cuda_tiles --kernels FOLDER [--json FILE]

Layers of Llama-3-8B in int8, int4 and FP8, and with rows that are rounded to int8 and FP8 too. Each
kernel is compared with the float32 product of the same factors, then timed in a CUDA graph over
more weights than caches hold. Printed for every layer and number of rows: the tiles that are kept,
the fastest ones, a weight that is expanded and multiplied by torch, torch's product of the same
bytes, torch's product in bfloat16 (the baseline), and microseconds that memory takes for the
weight. `--smoke` runs small layers on Triton's interpreter.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Container, Iterator
from dataclasses import astuple, dataclass, replace
from functools import partial
from pathlib import Path

import torch
from rich.table import Table

from benchmarks.cuda_products import (
    Tensors,
    error_of,
    expected,
    linear_shapes,
    multiply,
    nbytes_of,
    operands_of,
    rounded,
    weight,
)
from benchmarks.cuda_run import Run, console, memory_bandwidth, micros
from kvgraph.contract.dims import ceildiv
from kvgraph.errors import KernelError
from kvgraph.kernels import aot
from kvgraph.kernels.launch import LaunchPlan
from kvgraph.kernels.linear_plan import (
    LinearShape,
    linear_variants,
    plan_linear,
    plan_tiles,
)
from kvgraph.kernels.matrix_tiles import MatrixTiles
from kvgraph.kernels.shapes import MULTIPROCESSORS
from kvgraph.kernels.variants import Variant
from kvgraph.ops.packed import E4M3
from kvgraph.runtime.sessions.expanded import Expanded

ROWS = (32, 64, 128, 256, 512)
EXPANDED = (256, 512, 1024, 2048, 4096)
PARTS = (1, 2, 3, 4, 6, 8)
PROGRAMS = 0.7, 5.0
"""For a multiprocessor: what is swept."""
BETWEEN = 128 << 20
"""Bytes of weights of a turn: more than an L2 cache holds."""
FASTEST, RECORDED = 3, 10
ROLE = "rows128"
"""Whose name swept kernels have."""
WARM_UP = 0.02


def candidates(shape: LinearShape) -> Iterator[MatrixTiles]:
    """Of many rows, or of any where x is rounded; nibbles fix the inputs of a step."""
    if shape.rounds:
        for block_m, block_n, block_k, warps, stages in (
            (16, 64, 128, 4, 4), (16, 64, 128, 4, 6), (16, 128, 128, 4, 4), (16, 128, 128, 8, 4),
            (16, 64, 256, 4, 4), (16, 128, 256, 8, 3),
            (32, 64, 128, 4, 4), (32, 64, 128, 4, 6), (32, 128, 128, 8, 4), (32, 64, 256, 4, 3),
            (64, 64, 128, 4, 4), (64, 64, 128, 4, 6), (64, 128, 128, 8, 4), (64, 128, 128, 4, 4),
            (128, 64, 128, 4, 4), (128, 128, 128, 8, 3), (128, 128, 128, 8, 4),
            (128, 256, 128, 8, 3), (256, 64, 128, 8, 4), (256, 128, 128, 8, 3),
        ):  # fmt: skip
            if block_k <= (shape.form.group or block_k):
                yield MatrixTiles(block_m, block_n, block_k, warps, stages)
        return
    for block_m, block_n, warps in (
        (32, 64, 4), (32, 128, 4), (32, 128, 8),
        (64, 64, 4), (64, 128, 4), (64, 128, 8),
        (128, 64, 4), (128, 128, 8), (128, 128, 4),
        (256, 64, 4), (256, 128, 8),
    ):  # fmt: skip
        for block_k in (64,) if shape.form.bits == 4 else (64, 128):
            for stages in (3, 4):
                yield MatrixTiles(block_m, block_n, block_k, warps, stages)


def parts_of(shape: LinearShape, tiles: MatrixTiles, rows: int, arch: str) -> Iterator[int]:
    few, many = (MULTIPROCESSORS[arch] * share for share in PROGRAMS)
    programs = ceildiv(rows, tiles.block_m) * ceildiv(shape.columns, tiles.block_n)
    for parts in PARTS:
        if parts == 1 or few <= programs * parts <= many:
            yield parts


def fits(tiles: MatrixTiles, rows: int) -> bool:
    """At most half of a tile is empty, and no program of few rows reads weights again."""
    return tiles.block_m <= max(rows, 32) and (rows <= 4 * tiles.block_m or tiles.block_m >= 128)


def variants_of(arch: str, only: str) -> Iterator[Variant]:
    for name, shape in linear_shapes():
        if only not in name:
            continue
        yield from linear_variants(shape, arch)
        for tiles in candidates(shape):
            for parts in (1, 2):
                plan = plan_tiles(shape, arch, tiles.block_m, ROLE, tiles, parts)
                yield from (one.variant for one in plan.launches)


def compile_tiles(arch: str, folder: Path, only: str) -> None:
    from kvgraph.compiler.targets.cuda import save_kernels

    made = []
    for variant in {each.name: each for each in variants_of(arch, only)}.values():
        try:
            made.append(aot.compile_variant(variant, arch))
        except KernelError as error:  # too much shared memory
            console.print(f"left out: {error}")
    save_kernels(made, arch, folder)


def timed(run: Run, call: Callable[[], object]) -> float:
    """Of many measurements, so each is short."""
    return micros(run, call, 5, calls=1, warm_up=WARM_UP)


@dataclass
class Layer:
    """A layer with as many weights as a turn reads; all results are those of the last one."""

    run: Run
    name: str
    shape: LinearShape
    sets: list[Tensors]
    plain: list[torch.Tensor]

    @classmethod
    def of(cls, run: Run, name: str, shape: LinearShape) -> Layer:
        size = shape.columns, shape.in_features
        one = weight(run, "", (shape.columns,), shape.in_features, shape)
        count = 1 if run.smoke else ceildiv(BETWEEN, nbytes_of(one))
        sets = [weight(run, "", size[:1], size[1], shape) for _ in range(count)]
        wide = 1 if run.smoke else ceildiv(BETWEEN, 2 * size[0] * size[1]) + 1
        plain = [torch.randn(size, device=run.device, dtype=torch.bfloat16) for _ in range(wide)]
        return cls(run, name, shape, [*sets, one], plain)


class Rows:
    """So many rows of a layer: what is timed, checked against float32."""

    def __init__(self, layer: Layer, rows: int) -> None:
        self.layer, self.rows = layer, rows
        self.x, self.outs = operands_of(layer.run, layer.shape, rows)
        self._wanted = expected(self.x, layer.sets[-1], layer.shape)

    def planned(self, plan: LaunchPlan) -> None:
        multiply(self.layer.run, plan, self.x, self.outs, self.layer.sets)

    def expanded(self) -> None:
        layer = Expanded(self.layer.shape, self.layer.run.arch, self.layer.run.launch)
        for given in self.layer.sets:
            layer.run(self.x, {"x": self.x, **given}, list(self.outs.values()))

    def library(self) -> None:
        """torch's products of the same bytes, without the rounding of x."""
        numbers, scales = rounded(self.x, self.layer.shape)
        for given in self.layer.sets:
            if self.layer.shape.form.codes != E4M3:
                torch._int_mm(numbers, given["weight"].T)
                continue
            of_columns = given["scales"][:1]
            torch._scaled_mm(
                numbers,
                given["weight"].T,
                scale_a=scales,
                scale_b=of_columns,
                out_dtype=torch.bfloat16,
            )

    def plain(self) -> None:
        for given in self.layer.plain:
            torch.nn.functional.linear(self.x, given)

    def microseconds(self, what: str, call: Callable[[], object]) -> float:
        """Of one layer; `what` is checked."""
        for out in self.outs.values():
            out.fill_(torch.nan)
        found = timed(self.layer.run, call) / len(self.layer.sets)
        error = error_of(self.outs, self._wanted)
        if not error < 2e-2:  # NaN too
            said = f"{self.layer.name}, {self.rows} rows, {what}"
            self.layer.run.check(said, False, f"error {error:.1e}")
        return found


def sweep(layer: Layer, known: Container[str] | None, table: Table) -> None:
    run, shape, arch = layer.run, layer.shape, layer.run.arch
    ideal = nbytes_of(layer.sets[0]) / memory_bandwidth(run) * 1e6
    for rows in (
        (32,) if run.smoke else sorted({*ROWS, *EXPANDED, *((1, 16) if shape.rounds else ())})
    ):
        given = Rows(layer, rows)
        found: list[tuple[float, str]] = []
        for tiles in candidates(shape):
            if not (rows in ROWS or shape.rounds) or not fits(tiles, rows):
                continue
            for parts in (1, 3) if run.smoke else parts_of(shape, tiles, rows, arch):
                plan = plan_tiles(shape, arch, rows, ROLE, tiles, parts)
                if known is not None and any(v.variant.name not in known for v in plan.launches):
                    continue
                said = f"{astuple(tiles)[:5]} x {parts}"
                found.append((given.microseconds(said, partial(given.planned, plan)), said))
        found.sort()
        kept = given.microseconds("kept", partial(given.planned, plan_linear(shape, arch, rows)))
        expanded = library = 0.0
        if shape.rounds and rows > 16 and not run.smoke:
            library = timed(run, given.library) / len(layer.sets)
        elif not shape.rounds and (rows in EXPANDED or run.smoke):
            expanded = given.microseconds("expanded", given.expanded)
        theirs = timed(run, given.plain) / len(layer.plain)
        run.found[f"{layer.name}/{rows}"] = {
            "kept": kept,
            "fastest": found[:RECORDED],
            "expanded": expanded,
            "library": library,
            "bfloat16": theirs,
            "memory": ideal,
        }
        table.add_row(
            layer.name,
            f"{rows}",
            f"{kept:.1f}",
            "\n".join(f"{us:.1f} {said}" for us, said in found[:FASTEST]),
            f"{expanded:.1f}" if expanded else "-",
            f"{library:.1f}" if library else "-",
            f"{theirs:.1f}",
            f"{ideal:.1f}",
        )


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--compile", type=Path, help="write the kernels into this folder, and end")
    parser.add_argument("--arch", default="sm_90", help="for --compile")
    parser.add_argument("--kernels", type=Path, help="a folder that --compile wrote")
    parser.add_argument("--only", default="", help="layers whose name has this")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--smoke", action="store_true")
    given = parser.parse_args()
    if given.compile:
        compile_tiles(given.arch, given.compile, given.only)
        return 0
    known: Container[str] | None = None
    if given.smoke:
        from kvgraph.kernels.run import run as launch
        from tests.support.interpreter import mend

        mend()
    else:
        from kvgraph.runtime.sessions.cuda_gpu import CudaGpu

        gpu = CudaGpu(given.kernels)
        launch, known = gpu.launch, gpu._cubins._kernels
    run = Run(given.arch, given.smoke, Path(), launch)
    table = Table(
        "layer", "rows", "kept us", "fastest", "expanded us", "its library", "bf16 us", "memory us"
    )
    for name, shape in linear_shapes():
        if given.only not in name:
            continue
        if given.smoke:
            outputs = tuple(min(n, 64) for n in shape.out_features)
            shape = replace(shape, in_features=512, out_features=outputs)
        sweep(Layer.of(run, name, shape), known, table)
        if given.json:
            given.json.write_text(json.dumps(run.found, indent=1) + "\n")
    console.print(table)
    console.print(f"{len(run.failures)} checks failed")
    return 1 if run.failures else 0


if __name__ == "__main__":
    sys.exit(main())
