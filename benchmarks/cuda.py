"""Everything of the CUDA backend, checked and then timed on one GPU in one run.

    python -m benchmarks.cuda [--only matrix,tokens,decode,prefill,step] [--json FILE]

Correctness first: the conformance matrix, tokens against transformers in float32, attention
against float64. Then times, medians of replayed or repeated launches:
- decode attention as a share of the copy bandwidth measured here (bytes: K and V of every context),
  against torch's SDPA and FlexAttention over contiguous K and V, which paging has not;
- prefill in TFLOP/s (4 * pairs * heads * head_dim), against SDPA;
- a decode step of an 8B-shaped bf16 model with CUDA graphs, as a share of (weights + K and V) over
  that bandwidth. Its weights are zeros, which flatter the clocks of matrix products.
`--smoke` runs tiny sizes on Triton's interpreter, to check this script where there is no GPU.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.table import Table

from benchmarks.cuda_run import Run, console, copy_bandwidth, goal, median_us, micros, wall_ms
from kvgraph.contract.inputs import ModelInputs
from kvgraph.kernels import aot, launch, variants
from kvgraph.kernels.launch import LaunchPlan, Sizes
from kvgraph.kernels.shapes import AttentionShape, CacheShape

ROOT = Path(__file__).parents[1]
LLAMA_8B = AttentionShape(CacheShape("bfloat16", "bfloat16", 8, 128, 128, 1), 32, 128**-0.5)
CACHED_BYTES = 120 << 20
"""Below twice the last-level cache of an H200 repeated reads do not come from memory."""
SDPA = torch.nn.functional.scaled_dot_product_attention


# ---- correctness ------------------------------------------------------------------------------


def matrix(run: Run) -> None:
    command = [sys.executable, "-m", "tests.support.matrix", "--arch", run.arch]
    command += ["--device", run.device, *(["llama-8b"] if run.smoke else [])]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    said = (done.stdout + done.stderr).strip().splitlines()
    for line in said:
        if line.startswith("FAILED"):
            console.print(line)
    run.check("conformance matrix", done.returncode == 0, said[-1] if said else "said nothing")


def tokens(run: Run) -> None:
    """64 greedy tokens of ragged prompts, float32, equal to transformers'."""
    from transformers import AutoModelForCausalLM

    import kvgraph
    from kvgraph import Engine, SamplingParams

    source = ROOT / "examples" / "tiny-llama"
    if run.smoke:
        run.check("tokens (skipped: tests/runtime/test_cuda_session.py)", True)
        return
    kvgraph.compile(source, run.folder / "tiny", target=f"cuda:{run.arch}", dtype="float32")
    engine = Engine(run.folder / "tiny", max_batch_size=8)
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).cuda()
    model.generation_config.eos_token_id = None
    rng = np.random.default_rng(0)
    prompts = [rng.integers(3, 200, n).tolist() for n in (1, 5, 17, 64, 100, 130, 33, 2)]
    sampling = SamplingParams(max_new_tokens=64, ignore_eos=True)
    found = [c.token_ids for c in engine.generate(prompts, sampling)]
    for prompt, mine in zip(prompts, found, strict=True):
        theirs = model.generate(
            torch.tensor([prompt]).cuda(),
            max_new_tokens=64,
            do_sample=False,
            pad_token_id=0,
        )[0, len(prompt) :].tolist()
        run.check(f"tokens of a prompt of {len(prompt)}", mine == theirs)


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


# ---- attention --------------------------------------------------------------------------------


def operands(run: Run, batch: int, new: int, context: int) -> dict[str, torch.Tensor]:
    """Paged K and V of `batch` contexts with shuffled pages, and q of their last `new` tokens."""
    page_size, device = LLAMA_8B.cache.page_size, run.device
    width = -(-context // page_size)
    generator = torch.Generator(device).manual_seed(0)
    shape = (batch * width + 1, 2, 1, page_size, LLAMA_8B.cache.kv_heads, 128)
    table = torch.randperm(batch * width, generator=generator, device=device, dtype=torch.int32)
    pool = torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16)
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
    }


def attend(run: Run, given: dict[str, torch.Tensor], new: int, context: int) -> Callable[[], None]:
    batch, width = given["lookup_table"].shape
    sizes = Sizes(batch, batch * new, new, context, width)
    count = 16 if run.smoke else torch.cuda.get_device_properties(0).multi_processor_count
    plan = launch.plan_attention(LLAMA_8B, run.arch, sizes, 0, multiprocessors=count)
    return lambda: run.launch(plan, given)


def contiguous(given: dict[str, torch.Tensor], context: int) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V `[batch, kv_heads, context, head_dim]`, as torch's own attention wants them."""
    pages = given["kv_blocks"][given["lookup_table"].long()]  # [B, M, 2, 1, S, K, D]
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
    bandwidth = copy_bandwidth(run)
    console.print(f"copy bandwidth {bandwidth / 1e12:.2f} TB/s (read + written)")
    run.found["copy_bytes_per_s"] = bandwidth
    table = Table("batch", "context", "us", "TB/s", "of copy", "SDPA us", "Flex us", "error")
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
        sdpa, flex = _torch_decode(run, given, context)
        share = nbytes / ours * 1e6 / bandwidth
        run.found[f"decode/{batch}x{context}"] = {"us": ours, "share": share, "sdpa": sdpa}
        table.add_row(
            *(f"{x}" for x in (batch, context)),
            f"{ours:.1f}", f"{nbytes / ours / 1e6:.2f}",
            f"{share:.0%}" if nbytes > CACHED_BYTES else f"({share:.0%}, cached)",
            f"{sdpa:.1f}", "-" if flex is None else f"{flex:.1f}", f"{error:.1e}",
        )  # fmt: skip
    console.print(table)
    goal(run, "decode", run.found.get("decode/64x4096", {}).get("share"), "batch 64 x 4096")


def _torch_decode(
    run: Run, given: dict[str, torch.Tensor], context: int
) -> tuple[float, float | None]:
    k, v = contiguous(given, context)
    q = given["q"][:, :, None]
    sdpa = micros(run, partial(SDPA, q, k, v, enable_gqa=True))
    if run.smoke:
        return sdpa, None
    try:
        from torch.nn.attention.flex_attention import flex_attention

        torch._dynamo.reset()  # past its limit of recompiles it would run unfused
        compiled = torch.compile(flex_attention, dynamic=False, fullgraph=True)
        return sdpa, micros(run, lambda: compiled(q, k, v, enable_gqa=True))
    except Exception as error:  # a baseline that does not run is said, and nothing fails
        console.print(f"FlexAttention: {type(error).__name__}: {str(error).splitlines()[0][:80]}")
        return sdpa, None


def prefill(run: Run) -> None:
    table = Table("rows", "tokens", "us", "TFLOP/s", "SDPA TFLOP/s", "ratio", "error")
    ratios = []
    for batch, new in [(1, 40)] if run.smoke else [(1, 2048), (1, 8192), (4, 2048), (8, 512)]:
        given = operands(run, batch, new, new)
        call = attend(run, given, new, new)
        call()
        error = check_attention(run, given, new, new)
        run.check(f"prefill {batch} x {new}", error < 2e-2, f"error {error:.1e}")
        flops = 4 * batch * new * (new + 1) / 2 * LLAMA_8B.heads * 128
        ours = flops / micros(run, call) / 1e6
        k, v = contiguous(given, new)
        q = given["q"].view(batch, new, -1, 128).transpose(1, 2).contiguous()
        theirs = flops / micros(run, partial(SDPA, q, k, v, is_causal=True, enable_gqa=True)) / 1e6
        ratios.append(ours / theirs)
        run.found[f"prefill/{batch}x{new}"] = {"tflops": ours, "sdpa": theirs}
        table.add_row(
            f"{batch}", f"{new}", f"{flops / ours / 1e6:.1f}", f"{ours:.1f}", f"{theirs:.1f}",
            f"{ours / theirs:.2f}", f"{error:.1e}",
        )  # fmt: skip
    console.print(table)
    goal(run, "prefill", statistics.median(ratios), "median ratio to SDPA")


# ---- a whole step -----------------------------------------------------------------------------


def step(run: Run) -> None:
    """Replayed decode steps of the 8B shape through the session, logits to the host included."""
    if run.smoke:
        run.check("step (skipped: needs a GPU)", True)
        return

    import kvgraph
    from benchmarks.compile import make_checkpoint
    from kvgraph.kv.paged import PagedKVCacheManager

    make_checkpoint("llama-8b", run.folder / "8b")
    kvgraph.compile(run.folder / "8b", run.folder / "8b.kvg", target=f"cuda:{run.arch}")
    artifact = kvgraph.load(run.folder / "8b.kvg", verify=False)
    session: Any = artifact.session()
    bandwidth = run.found.get("copy_bytes_per_s") or copy_bandwidth(run)
    weights = (run.folder / "8b.kvg" / "weights.safetensors").stat().st_size
    embedding = 128256 * 4096 * 2  # a step gathers a few rows of it
    table = Table("batch", "context", "device ms", "session ms", "bytes GB", "of bandwidth")
    for batch, context in ((1, 512), (1, 4096), (8, 4096), (64, 4096)):
        params: Any = artifact.params()
        pages = batch * -(-context // params.page_size)
        kv = PagedKVCacheManager(params, session, pages, max_batch_size=batch)
        inputs, values = _decode_inputs(kv, batch, context)
        for _ in range(3):
            session.run(inputs, values, capture=True)
        whole = wall_ms(partial(session.run, inputs, values, capture=True))
        replay = next(reversed(session._captured.values()))
        device = median_us(replay, 20) / 1e3
        nbytes = weights - embedding + batch * context * params.bytes_per_page // params.page_size
        share = nbytes / (device / 1e3) / bandwidth
        run.found[f"step/{batch}x{context}"] = {"ms": device, "session_ms": whole, "share": share}
        table.add_row(
            f"{batch}", f"{context}", f"{device:.2f}", f"{whole:.2f}", f"{nbytes / 1e9:.1f}",
            f"{share:.0%}",
        )  # fmt: skip
        del kv, values
        session._captured.clear()
        torch.cuda.empty_cache()
    console.print(table)
    goal(run, "step", run.found["step/64x4096"]["share"], "batch 64 x 4096")


def _decode_inputs(kv: Any, batch: int, context: int) -> tuple[ModelInputs, Any]:
    from kvgraph import TextContext

    rows = [TextContext(i, np.zeros(context, np.int32)) for i in range(batch)]
    for row in rows:
        kv.claim(row.request_id)
        kv.alloc(row)
        row.skip_processing(context - 1)
    offsets = np.arange(batch + 1, dtype=np.int32)
    inputs = ModelInputs(np.zeros(batch, np.int32), offsets, offsets[:-1])
    return inputs, kv.runtime_inputs([rows])


# ---- the machine ------------------------------------------------------------------------------


def launcher(arch: str, smoke: bool, folder: Path) -> Callable[[LaunchPlan, dict[str, Any]], None]:
    """What runs plans of `LLAMA_8B`: cubins compiled here and now, or the interpreter."""
    if smoke:
        from kvgraph.kernels.run import run
        from tests.support.bfloat16 import mend

        mend()
        return run
    from kvgraph.compiler.targets.cuda import save_kernels
    from kvgraph.runtime.sessions.cuda_gpu import CudaGpu

    save_kernels(list(aot.compile_all(_variants(arch), arch)), arch, folder)
    return CudaGpu(folder).launch


def _variants(arch: str) -> Iterator[variants.Variant]:
    yield variants.store_variant(LLAMA_8B.cache, None)
    yield from variants.attention_variants(LLAMA_8B, arch)


SECTIONS = {"matrix": matrix, "tokens": tokens, "decode": decode, "prefill": prefill, "step": step}


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default=",".join(SECTIONS))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--smoke", action="store_true")
    given = parser.parse_args()
    if not given.smoke and not torch.cuda.is_available():
        console.print("no NVIDIA GPU here: nothing was measured (--smoke checks this script)")
        return 1
    arch = "sm_90"
    if not given.smoke:
        arch = "sm_{}{}".format(*torch.cuda.get_device_capability())
        console.print(f"{torch.cuda.get_device_name()}, {arch}, torch {torch.__version__}")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        run = Run(arch, given.smoke, folder, launcher(arch, given.smoke, folder))
        for section in given.only.split(","):
            console.rule(section)
            try:
                SECTIONS[section](run)
            except Exception as error:  # the other sections still say what they found
                traceback.print_exc()
                run.check(section, False, type(error).__name__)
            if given.json:
                found = {**run.found, "failures": run.failures}
                given.json.write_text(json.dumps(found, indent=1) + "\n")
    console.print(
        f"{len(run.failures)} checks failed{': ' if run.failures else ''}" + ", ".join(run.failures)
    )
    return 1 if run.failures else 0


if __name__ == "__main__":
    sys.exit(main())
