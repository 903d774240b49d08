"""Attention of `benchmarks.cuda`: checked against float64, timed against torch's own."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from rich.table import Table
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.cuda_run import Run, console, goal, memory_bandwidth, micros
from kvgraph.contract.dtypes import DTYPES
from kvgraph.kernels import launch
from kvgraph.kernels.launch import Sizes
from kvgraph.kernels.shapes import AttentionShape, PoolShape

LLAMA_8B = AttentionShape(PoolShape("bfloat16", "bfloat16", 8, 128, 128, 1), 32, 128**-0.5)
CACHED_BYTES = 120 << 20
"""Below twice the last-level cache of an H200 repeated reads do not come from memory."""
SDPA = torch.nn.functional.scaled_dot_product_attention
PEERS = {"flash": SDPBackend.FLASH_ATTENTION, "cuDNN": SDPBackend.CUDNN_ATTENTION}
FLEX = (64, 4096)
"""Where FlexAttention is measured: it is compiled for each size."""
QUANTIZED = ("int8", "float8_e4m3fn")


def reference(q_TND: torch.Tensor, k_CKD: torch.Tensor, v_CKD: torch.Tensor) -> torch.Tensor:
    """Attention of one row's last T tokens over its C keys, in float64."""
    groups = q_TND.shape[1] // k_CKD.shape[1]
    q = q_TND.double().transpose(0, 1)
    k, v = (x.double().repeat_interleave(groups, 1).transpose(0, 1) for x in (k_CKD, v_CKD))
    scores = q @ k.transpose(1, 2) * LLAMA_8B.scale
    count, length = scores.shape[1:]
    seen = torch.arange(length, device=q.device) <= (
        torch.arange(count, device=q.device)[:, None] + length - count
    )
    return (scores.masked_fill(~seen, -torch.inf).softmax(-1) @ v).transpose(0, 1)


def shape_of(pool: str) -> AttentionShape:
    """LLAMA_8B over a pool of this dtype; a quantised one has a scale for each head."""
    granularity = 128 if pool in QUANTIZED else 0
    cache = replace(LLAMA_8B.cache, pool_dtype=pool, granularity=granularity)
    return replace(LLAMA_8B, cache=cache)


def quantize(x: torch.Tensor, pool: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Stored values, and their scales: largest of a head over the largest that can be stored."""
    largest = DTYPES[pool].largest
    scales = x.float().abs().amax(-1, keepdim=True) / largest
    stored = x.float() / scales
    return (stored.round() if pool == "int8" else stored).to(getattr(torch, pool)), scales


def operands(
    run: Run, batch: int, new: int, context: int, pool_dtype: str = "bfloat16"
) -> dict[str, torch.Tensor]:
    """Paged K and V of `batch` contexts with shuffled pages, and q of their last `new` tokens."""
    page_size, device = LLAMA_8B.cache.page_size, run.device
    width = -(-context // page_size)
    generator = torch.Generator(device).manual_seed(0)
    shape = (batch * width + 1, 2, 1, page_size, LLAMA_8B.cache.kv_heads, 128)
    table = torch.randperm(batch * width, generator=generator, device=device, dtype=torch.int32)
    pool = torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16)
    scales = {}
    if pool_dtype in QUANTIZED:
        pool, scales["kv_scales"] = quantize(pool, pool_dtype)
    else:
        pool[-1] = torch.nan  # the null page
    q_shape = (batch * new, LLAMA_8B.heads, 128)
    q = torch.randn(q_shape, generator=generator, device=device, dtype=torch.bfloat16)
    return {
        "q": q,
        "kv_blocks": pool,
        "input_row_offsets": torch.arange(batch + 1, device=device, dtype=torch.int32) * new,
        "cache_lengths": torch.full((batch,), context - new, device=device, dtype=torch.int32),
        "lookup_table": table.view(batch, width),
        "out": torch.full_like(q, torch.nan),
        **scales,
    }


def attend(run: Run, given: dict[str, torch.Tensor], new: int, context: int) -> Callable[[], None]:
    batch, width = given["lookup_table"].shape
    sizes = Sizes(batch, batch * new, new, context, width)
    count = 16 if run.smoke else torch.cuda.get_device_properties(0).multi_processor_count
    shape = shape_of(str(given["kv_blocks"].dtype).removeprefix("torch."))
    plan = launch.plan_attention(shape, run.arch, sizes, 0, multiprocessors=count)
    return lambda: run.launch(plan, given)


def contiguous(given: dict[str, torch.Tensor], context: int) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V `[batch, kv_heads, context, head_dim]`, as torch's own attention wants them."""
    at = given["lookup_table"].long()
    pages = given["kv_blocks"][at]  # [B, M, 2, 1, S, K, D]
    if "kv_scales" in given:
        pages = pages.float() * given["kv_scales"][at]
    k, v = (pages[:, :, i, 0].flatten(1, 2)[:, :context] for i in (0, 1))
    return k.transpose(1, 2).contiguous(), v.transpose(1, 2).contiguous()


def check_attention(run: Run, given: dict[str, torch.Tensor], new: int, context: int) -> float:
    """Largest error of three rows as a share of the largest value in float64; NaN if any is."""
    errors = []
    batch = given["lookup_table"].shape[0]
    for row in {0, batch // 2, batch - 1}:
        one = {**given, "lookup_table": given["lookup_table"][row : row + 1]}
        k, v = (x[0].transpose(0, 1) for x in contiguous(one, context))
        rows = slice(row * new, (row + 1) * new)
        want = reference(given["q"][rows], k, v)
        errors.append((given["out"][rows].double() - want).abs().max() / want.abs().max())
    errors.append(torch.where(given["out"].isfinite().all(), 0.0, torch.nan))
    return float(torch.stack([error.double() for error in errors]).max())  # NaN if any is


def decode(run: Run) -> None:
    bandwidth = memory_bandwidth(run)
    table = Table("batch", "context", "us", "TB/s", "of memory", *PEERS, "Flex", "error")
    cases = [(b, c) for c in (512, 4096, 32768) for b in (1, 8, 64, 256)]
    for batch, context in [(2, 300)] if run.smoke else cases:
        nbytes = batch * context * 2 * 8 * 128 * 2
        if nbytes > 24 << 30:
            continue
        given = operands(run, batch, 1, context)
        call = attend(run, given, 1, context)
        call()
        error = check_attention(run, given, 1, context)
        run.check(f"decode {batch} x {context}", error < 2e-2, f"error {error:.1e}")
        ours = micros(run, call)
        q = given["q"][:, :, None]
        k, v = contiguous(given, context)
        peers = timed_peers(run, q, k, v, is_causal=False)
        peers["Flex"] = _flex(run, q, k, v) if (batch, context) == FLEX else None
        share = nbytes / ours * 1e6 / bandwidth
        run.found[f"decode/{batch}x{context}"] = {"us": ours, "share": share, **peers}
        table.add_row(
            *(f"{x}" for x in (batch, context)),
            f"{ours:.1f}", f"{nbytes / ours / 1e6:.2f}",
            f"{share:.0%}" if nbytes > CACHED_BYTES else f"({share:.0%}, cached)",
            *(f"{us:.1f}" if us else "-" for us in peers.values()), f"{error:.1e}",
        )  # fmt: skip
    console.print(table)
    goal(run, "decode", run.found.get("decode/64x4096", {}).get("share"), "batch 64 x 4096")


def quantized(run: Run) -> None:
    """Decode over int8 and float8: the same keys in half of the bytes and a scale for each head."""
    bandwidth = memory_bandwidth(run)
    table = Table(
        "pool", "batch", "context", "us", "TB/s", "of memory", "bf16 pool / this", "error"
    )
    for batch, context in [(2, 300)] if run.smoke else [(1, 32768), (8, 4096), (64, 4096)]:
        wide = micros(run, attend(run, operands(run, batch, 1, context), 1, context))
        for pool in QUANTIZED:
            given = operands(run, batch, 1, context, pool)
            call = attend(run, given, 1, context)
            call()
            error = check_attention(run, given, 1, context)
            run.check(f"decode {pool} {batch} x {context}", error < 2e-2, f"error {error:.1e}")
            ours = micros(run, call)
            nbytes = batch * context * 2 * 8 * (128 + 4)
            share = nbytes / ours * 1e6 / bandwidth
            found = {"us": ours, "share": share, "bfloat16": wide}
            run.found[f"quantized/{pool}/{batch}x{context}"] = found
            table.add_row(
                pool, f"{batch}", f"{context}", f"{ours:.1f}", f"{nbytes / ours / 1e6:.2f}",
                f"{share:.0%}" if nbytes > CACHED_BYTES else f"({share:.0%}, cached)",
                f"{wide / ours:.2f}", f"{error:.1e}",
            )  # fmt: skip
    console.print(table)


def timed_peers(
    run: Run, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, is_causal: bool
) -> dict[str, float | None]:
    """Microseconds of torch's attention by each of PEERS; None, and why, where it does not run."""
    return {name: _timed_peer(run, name, (q, k, v), is_causal) for name in PEERS}


def _timed_peer(
    run: Run, name: str, qkv: tuple[torch.Tensor, ...], is_causal: bool
) -> float | None:
    """A prefill with as many heads of K and V as of q, where it takes no groups of them."""
    try:
        with sdpa_kernel(PEERS[name]):
            return micros(run, partial(SDPA, *qkv, is_causal=is_causal, enable_gqa=True))
    except Exception as error:  # a baseline that does not run is said, and nothing fails
        q, k, v = qkv
        groups = q.shape[1] // k.shape[1]
        if is_causal and groups > 1:
            run.found.setdefault("repeated", []).append(name)
            console.print(f"{name}: K and V are repeated for each head: {_first_line(error)}")
            k, v = (x.repeat_interleave(groups, 1) for x in (k, v))
            return _timed_peer(run, name, (q, k, v), is_causal)
        console.print(f"{name}: {_first_line(error)}")
        return None


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0][:80]}"


def _flex(run: Run, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> float | None:
    if run.smoke:
        return None
    try:
        from torch.nn.attention.flex_attention import flex_attention

        torch._dynamo.reset()  # past its limit of recompiles it would run unfused
        compiled = torch.compile(flex_attention, dynamic=False, fullgraph=True)
        return micros(run, lambda: compiled(q, k, v, enable_gqa=True))
    except Exception as error:
        console.print(f"FlexAttention: {_first_line(error)}")
        return None


def prefill(run: Run) -> None:
    table = Table("rows", "tokens", "us", "TFLOP/s", *PEERS, "of the best", "error")
    ratios = []
    for batch, new in [(1, 40)] if run.smoke else [(1, 2048), (1, 8192), (4, 2048), (8, 512)]:
        given = operands(run, batch, new, new)
        call = attend(run, given, new, new)
        call()
        error = check_attention(run, given, new, new)
        run.check(f"prefill {batch} x {new}", error < 2e-2, f"error {error:.1e}")
        flops = 4 * batch * new * (new + 1) / 2 * LLAMA_8B.heads * 128
        ours = micros(run, call)
        k, v = contiguous(given, new)
        q = given["q"].view(batch, new, -1, 128).transpose(1, 2).contiguous()
        peers = timed_peers(run, q, k, v, is_causal=True)
        best = min((us for us in peers.values() if us), default=None)
        ratios += [best / ours] if best else []
        run.found[f"prefill/{batch}x{new}"] = {"us": ours, **peers}
        table.add_row(
            f"{batch}", f"{new}", f"{ours:.1f}", f"{flops / ours / 1e6:.1f}",
            *(f"{flops / us / 1e6:.1f}" if us else "-" for us in peers.values()),
            f"{best / ours:.2f}" if best else "-", f"{error:.1e}",
        )  # fmt: skip
    console.print(table)
    goal(run, "prefill", statistics.median(ratios or [0.0]), "median ratio to the best of torch's")
