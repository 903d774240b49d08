"""Products over small weights and experts, of `benchmarks.cuda`: checked, then timed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch
from rich.table import Table

from benchmarks.cuda_run import Run, console, memory_bandwidth, micros
from kvgraph.kernels.experts_plan import ExpertsShape, experts_variants, plan_experts
from kvgraph.kernels.launch import LaunchPlan
from kvgraph.kernels.linear_plan import LinearShape, linear_variants, plan_linear
from kvgraph.kernels.variants import Variant
from kvgraph.ops import matrices
from kvgraph.ops.packed import E4M3, LEVELS, Form
from tests.support.matrix_products import LLAMA_8B, QWEN3_30B

BETWEEN = 256 << 20
"""Bytes that are read between two uses of a weight: more than any cache holds."""
FORMS = {
    "int8": (Form(8), False),
    "int4": (Form(4), False),
    "FP8": (Form(8, 128, E4M3), False),
    "int8 x int8": (Form(8), True),
    "FP8 x FP8": (Form(8, codes=E4M3), True),
    "FP8 blocks x FP8": (Form(8, 128, E4M3), True),
}
"""Form of the weight, and whether x is rounded to its numbers too."""
ROWS, EXPERT_ROWS = (1, 16, 64, 256), (1, 8, 64, 1024)
Tensors = dict[str, torch.Tensor]


def linear_shapes() -> Iterator[tuple[str, LinearShape]]:
    for layer, shape in LLAMA_8B.items():
        for name, (form, rounds) in FORMS.items():
            yield f"{layer}, {name}", replace(shape, form=form, rounds=rounds)


def experts_shapes() -> Iterator[tuple[str, ExpertsShape]]:
    for bits in (0, 8, 4):
        name = f"experts, {f'int{bits}' if bits else 'bf16'}"
        yield name, replace(QWEN3_30B, up=Form(bits), down=Form(bits))


def product_variants(arch: str) -> Iterator[Variant]:
    for _, linear in linear_shapes():
        yield from linear_variants(linear, arch)
    for _, experts in experts_shapes():
        yield from experts_variants(experts, arch)


def weight(run: Run, name: str, leading: tuple[int, ...], inputs: int, form: Form) -> Tensors:
    """A weight as it is stored; "weight" where `name` is empty."""
    prefix, device = f"{name}_" if name else "", run.device
    depth = matrices.depth_of(inputs, form.bits, form.group)
    if not form.bits:
        values = torch.randn(*leading, depth, device=device, dtype=torch.bfloat16) * inputs**-0.5
        return {name: values}
    stored = torch.randint(-127, 127, (*leading, depth), device=device, dtype=torch.int8)
    if form.codes == E4M3:
        stored = (stored.float() / 64).to(torch.float8_e4m3fn)
    *stacked, columns = leading
    groups = *stacked, matrices.groups_of(inputs, form.bits, form.group), columns
    scales = torch.rand(groups, device=device) * 1e-3 + 1e-3
    return {name or "weight": stored, f"{prefix}scales": scales}


def decoded(given: Tensors, inputs: int, form: Form) -> torch.Tensor:
    """`[columns, inputs]` in float32, as `matrices.decode` has it."""
    stored = given["weight"]
    if form.bits == 4:
        half = matrices.span_of(form.group) // 2
        spans = stored.view(torch.uint8).view(len(stored), -1, half)
        codes = torch.cat([spans & 15, spans >> 4], -1).flatten(1)[:, :inputs]
        numbers = torch.tensor(LEVELS[form.codes], device=codes.device)[codes.long()]
    else:
        numbers = stored.float()
    each = matrices.group_of(form.bits, form.group) or inputs
    return numbers * given["scales"].T.repeat_interleave(each, 1)[:, :inputs]


def rounded(x: torch.Tensor, shape: LinearShape) -> tuple[torch.Tensor, torch.Tensor]:
    """Numbers of the weight's kind, and a scale for each row `[rows, 1]`."""
    kind = torch.float8_e4m3fn if shape.form.codes == E4M3 else torch.int8
    scales = x.float().abs().amax(1, keepdim=True) / (448 if shape.form.codes == E4M3 else 127)
    numbers = x.float() / scales
    return (numbers if shape.form.codes == E4M3 else numbers.round()).to(kind), scales


def expected(x: torch.Tensor, given: Tensors, shape: LinearShape) -> list[torch.Tensor]:
    wide = x.float()
    if shape.rounds:
        numbers, scales = rounded(x, shape)
        wide = numbers.float() * scales
    y = wide @ decoded(given, shape.in_features, shape.form).T
    if not shape.gated:
        return list(y.split([n for n in shape.out_features if n], 1))
    gate, up = y[:, ::2], y[:, 1::2]
    return [torch.nn.functional.silu(gate) * up]


def operands_of(run: Run, shape: LinearShape, rows: int) -> tuple[torch.Tensor, Tensors]:
    """x, and the outputs by name."""
    x = torch.randn(rows, shape.in_features, device=run.device, dtype=torch.bfloat16)
    outs = {
        name: torch.full((rows, width), torch.nan, device=run.device, dtype=torch.bfloat16)
        for name, width in zip(("out", "out_1", "out_2"), shape.out_features, strict=True)
        if width
    }
    return x, outs


def multiply(
    run: Run, plan: LaunchPlan, x: torch.Tensor, outs: Tensors, sets: list[Tensors]
) -> None:
    """x with each of the weights; the outputs are those of the last."""
    for given in sets:
        run.launch(plan, {"x": x, **given, **outs})


def error_of(outs: Tensors, wanted: list[torch.Tensor]) -> float:
    """Largest, as a share of an output's largest value; NaN if any is."""
    errors = [
        (out.float() - y).abs().max() / y.abs().max()
        for out, y in zip(outs.values(), wanted, strict=True)
    ]
    return float(torch.stack(errors).max())


def nbytes_of(given: Tensors) -> int:
    return sum(tensor.nbytes for tensor in given.values())


def linears(run: Run) -> None:
    """Layers of Llama-3-8B: bytes of the weights a second, against torch's product in bfloat16."""
    bandwidth = memory_bandwidth(run)
    table = Table("layer", "rows", "us", "TB/s", "of memory", "bf16 us", "bf16 / this", "error")
    plain: dict[tuple[str, int], float] = {}
    for name, shape in linear_shapes():
        if run.smoke:
            shape = replace(shape, in_features=256, out_features=(64, *shape.out_features[1:]))
            shape = replace(shape, out_features=tuple(min(n, 64) for n in shape.out_features))
        layer = name.rpartition(", ")[0]
        columns = (shape.columns,)
        one = weight(run, "", columns, shape.in_features, shape)
        count = 1 if run.smoke else -(-BETWEEN // nbytes_of(one))
        more = [weight(run, "", columns, shape.in_features, shape) for _ in range(count)]
        sets = [*more, one]
        for rows in ROWS[:2] if run.smoke else ROWS:
            x, outs = operands_of(run, shape, rows)
            call = partial(multiply, run, plan_linear(shape, run.arch, rows), x, outs, sets)
            call()
            error = error_of(outs, expected(x, one, shape))
            run.check(f"{name}, {rows} rows", error < 2e-2, f"error {error:.1e}")
            ours = micros(run, call, 10) / len(sets)
            if (layer, rows) not in plain:
                plain[layer, rows] = _torch_product(run, x, shape)
            theirs = plain[layer, rows]
            rate = nbytes_of(one) / ours * 1e6
            share = rate / bandwidth
            run.found[f"linear/{name}/{rows}"] = {"us": ours, "share": share, "bfloat16": theirs}
            table.add_row(
                name, f"{rows}", f"{ours:.1f}", f"{rate / 1e12:.2f}", f"{share:.0%}",
                f"{theirs:.1f}", f"{theirs / ours:.2f}", f"{error:.1e}",
            )  # fmt: skip
    console.print(table)


def _torch_product(run: Run, x: torch.Tensor, shape: LinearShape) -> float:
    size = (shape.columns, shape.in_features)
    count = 1 if run.smoke else -(-BETWEEN // (2 * shape.columns * shape.in_features)) + 1
    weights = [torch.randn(size, device=run.device, dtype=torch.bfloat16) for _ in range(count)]

    def call() -> None:
        for each in weights:
            torch.nn.functional.linear(x, each)

    return micros(run, call, 10) / len(weights)


def experts(run: Run) -> None:
    """Experts of Qwen3-30B-A3B: bytes of those that some row chose, against the memory's;
    products in TFLOP/s, against one product of torch with as many operations."""
    bandwidth = memory_bandwidth(run)
    table = Table("experts", "rows", "us", "TB/s", "of memory", "TFLOP/s", "one product", "error")
    for name, shape in experts_shapes():
        if run.smoke:
            shape = replace(shape, experts=16, in_features=256, inner_features=64)
        count, width, inner = shape.experts, shape.in_features, shape.inner_features
        given = weight(run, "up", (count, 2 * inner), width, shape.up)
        given |= weight(run, "down", (count, width), inner, shape.down)
        for rows in EXPERT_ROWS[:2] if run.smoke else EXPERT_ROWS:
            _time_experts(run, name, shape, rows, given, bandwidth, table)
    console.print(table)


def _time_experts(
    run: Run,
    name: str,
    shape: ExpertsShape,
    rows: int,
    given: Tensors,
    bandwidth: float,
    table: Table,
) -> None:
    count, width, inner, active = (
        shape.experts, shape.in_features, shape.inner_features, shape.active,
    )  # fmt: skip
    x = torch.randn(rows, width, device=run.device, dtype=torch.bfloat16)
    out = torch.full_like(x, torch.nan)
    weights = torch.rand(rows, active, device=run.device)
    each = nbytes_of(given) / count
    sets = max(2, min(16, -(-BETWEEN // int(min(rows * active, count) * each))))
    chosen = [
        torch.stack([torch.randperm(count, device=run.device)[:active] for _ in range(rows)]).int()
        for _ in range(sets)
    ]
    plan = plan_experts(shape, run.arch, rows)

    def call() -> None:
        for indices in chosen:
            run.launch(plan, {"x": x, "indices": indices, "weights": weights, "out": out, **given})

    call()
    error = _error_of_experts(shape, given, x, chosen[-1], weights, out)
    run.check(f"{name}, {rows} rows", error < 3e-2, f"error {error:.1e}")
    ours = micros(run, call, 10) / sets
    used = sum(len(indices.unique()) for indices in chosen) / sets
    rate, flops = used * each / ours * 1e6, 6 * rows * active * width * inner / ours * 1e6
    wide = torch.randn(3 * inner, width, device=run.device, dtype=torch.bfloat16)
    many = torch.randn(rows * active, width, device=run.device, dtype=torch.bfloat16)
    theirs = micros(run, lambda: torch.nn.functional.linear(many, wide), 10)
    found = {"us": ours, "share": rate / bandwidth, "tflops": flops / 1e12, "one": theirs}
    run.found[f"experts/{name}/{rows}"] = found
    table.add_row(
        name, f"{rows}", f"{ours:.1f}", f"{rate / 1e12:.2f}", f"{rate / bandwidth:.0%}",
        f"{flops / 1e12:.0f}", f"{theirs:.1f}", f"{error:.1e}",
    )  # fmt: skip


def _error_of_experts(
    shape: ExpertsShape,
    given: Tensors,
    x: torch.Tensor,
    indices: torch.Tensor,
    weights: torch.Tensor,
    out: torch.Tensor,
) -> float:
    """Of the first and the last row, as a share of the largest value."""
    errors = []
    for row in {0, len(x) - 1}:
        want = torch.zeros(x.shape[1], device=x.device)
        for slot, expert in enumerate(indices[row].tolist()):
            both = _plain(shape.up, given, "up", expert, shape.in_features)
            inner = both @ x[row].float()
            gate, up = inner[::2], inner[1::2]
            mid = (torch.nn.functional.silu(gate) * up).bfloat16().float()
            down = _plain(shape.down, given, "down", expert, shape.inner_features)
            want += weights[row, slot] * (down @ mid)
        errors.append(float((out[row].float() - want).abs().max() / want.abs().max()))
    return max(errors) if bool(out.isfinite().all()) else float("nan")


def _plain(form: Form, given: Tensors, name: str, expert: int, inputs: int) -> torch.Tensor:
    if not form.bits:
        return given[name][expert].float()
    one = {"weight": given[name][expert], "scales": given[f"{name}_scales"][expert]}
    return decoded(one, inputs, form)
