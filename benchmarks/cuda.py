"""Everything of the CUDA backend, checked and then timed on one GPU in one run.

    python -m benchmarks.cuda [--only matrix,tokens,decode,linears,step] [--json FILE]
    python -m benchmarks.cuda --compile FOLDER [--arch sm_90]     # needs no GPU
    python -m benchmarks.cuda --kernels FOLDER --artifact ARTIFACT [--only decode,step]

Correctness first: the conformance matrix, tokens against transformers in float32, attention
against float64. Then times, medians of replayed or repeated launches:
- decode attention as a share of the memory bandwidth measured here (bytes: K and V of contexts),
  against torch's SDPA by FlashAttention and by cuDNN, each by name, and FlexAttention, all over
  contiguous K and V, which paging has not;
- the same over pools of int8 and float8 (bytes: theirs, with scales), against a bfloat16 pool;
- prefill in TFLOP/s (4 * pairs * heads * head_dim), against FlashAttention and cuDNN;
- linear layers over small weights and experts (bytes: those of the weights that are read), against
  products of torch in bfloat16;
- routers, against the operators that models write;
- a decode step of an 8B-shaped bf16 model with CUDA graphs, as a share of (weights + K and V) over
  that bandwidth. Its weights are normal values, written on the GPU.
`--kernels` has cubins of a machine with Triton, `--artifact` (for the step) is compiled there too.
`--smoke` runs tiny sizes on Triton's interpreter, to check this script where there is no GPU.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from rich.table import Table

from benchmarks.cuda_attention import LLAMA_8B, QUANTIZED, decode, prefill, quantized, shape_of
from benchmarks.cuda_products import experts, linears, product_variants
from benchmarks.cuda_routers import NAMES, routers
from benchmarks.cuda_run import Run, console, goal, median_us, memory_bandwidth, wall_ms
from kvgraph.contract.inputs import ModelInputs
from kvgraph.kernels import aot, variants
from kvgraph.kernels.launch import LaunchPlan
from kvgraph.kernels.route_plan import route_variant
from kvgraph.runtime.sessions import program as sessions
from tests.support.routes import ROUTES

ROOT = Path(__file__).parents[1]


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


# ---- a whole step -----------------------------------------------------------------------------

STEPS = ((1, 512), (1, 4096), (8, 4096), (64, 4096), (256, 1024))
"""Rows and their contexts."""
LEAST_WEIGHTS = 1024
"""Of a norm or a product; what has fewer are constants of the rotary embedding."""
EXPONENT = 114
"""Of FP4's groups: 2^-13. Offsets of whole numbers are as many, and change nothing of the time."""
PREFILLS = (128, 512, 2048, 8192)
ENGINE_ROWS, PROMPT, NEW = (1, 64, 256), 128, 64


def step(run: Run) -> None:
    """Replayed decode steps of the 8B shape through the session, logits to the host included."""
    if run.smoke:
        run.check("step (skipped: needs a GPU)", True)
        return

    import kvgraph
    from benchmarks.compile import make_checkpoint
    from kvgraph.kv.paged import PagedKVCacheManager

    folder = run.artifact or run.folder / "8b.kvg"
    if run.artifact is None:
        make_checkpoint("llama-8b", run.folder / "8b")
        kvgraph.compile(run.folder / "8b", folder, target=f"cuda:{run.arch}")
    artifact = kvgraph.load(folder, verify=False)
    embedding = 0  # a step gathers a few rows of it
    read = sessions.read_program

    def read_filled(*given: Any) -> Any:
        nonlocal embedding
        program = read(*given)
        embedding = sum(t.nbytes for n, t in program.state_dict.items() if "embed_tokens" in n)
        fill(program.state_dict)
        return program

    with mock.patch.object(sessions, "read_program", read_filled):
        session: Any = artifact.session()
    bandwidth = memory_bandwidth(run)
    weights = (folder / "weights.safetensors").stat().st_size
    table = Table("batch", "context", "device ms", "session ms", "bytes GB", "of bandwidth")
    for batch, context in STEPS:
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
    for tokens in PREFILLS:
        _prefill_step(run, artifact, session, tokens)
    for batch in ENGINE_ROWS:
        _engine(run, artifact, session, batch)
    goal(run, "step", run.found.get("step/64x4096", {}).get("share"), "batch 64 x 4096")


def _prefill_step(run: Run, artifact: Any, session: Any, tokens: int) -> None:
    """A step of one prompt, which is not captured: launched operator by operator."""
    from kvgraph import TextContext
    from kvgraph.kv.paged import PagedKVCacheManager

    params = artifact.params()
    pages = -(-tokens // params.page_size)
    kv = PagedKVCacheManager(params, session, pages, max_batch_size=1)
    row = TextContext(0, np.zeros(tokens, np.int32))
    kv.claim(row.request_id)
    kv.alloc(row)
    inputs = ModelInputs(
        np.zeros(tokens, np.int32),
        np.array([0, tokens], np.int32),
        np.array([tokens - 1], np.int32),
    )
    values = kv.runtime_inputs([[row]])
    session.run(inputs, values)
    ms = wall_ms(partial(session.run, inputs, values), 7)
    run.found[f"prefill_step/{tokens}"] = {"ms": ms}
    console.print(f"prompt of {tokens} tokens: {ms:.1f} ms, {tokens / ms * 1e3:.0f} tokens/s")


def _engine(run: Run, artifact: Any, session: Any, batch: int) -> None:
    """Milliseconds of an engine's decode step, with scheduling and sampling, over PROMPT tokens."""
    from kvgraph import Engine, SamplingParams

    pages = batch * -(-(PROMPT + NEW) // artifact.params().page_size) + 1
    engine = Engine(artifact, session=session, num_pages=pages, max_batch_size=batch)
    prompts = np.random.default_rng(0).integers(3, 150, (batch, PROMPT)).tolist()
    sampling = SamplingParams(max_new_tokens=NEW, ignore_eos=True)
    for _ in range(2):  # the first pass captures
        start = time.perf_counter()
        done = engine.generate(prompts, sampling)
        seconds = time.perf_counter() - start
    last = [1e3 / each.decode_tokens_per_second for each in done]
    run.found[f"engine/{batch}"] = {"ms": min(last), "seconds": seconds}
    console.print(
        f"engine, {batch} rows of {PROMPT} and {NEW} tokens: {min(last):.2f} ms a step of the last "
        f"row, {batch * NEW / seconds:.0f} tokens/s with the prompts"
    )


def fill(weights: Mapping[str, torch.Tensor]) -> None:
    """Values that take as much power as a model's: normal weights, any bytes, small scales."""
    with torch.no_grad():
        for name, tensor in weights.items():
            if "group_bytes" in name:
                tensor.fill_(EXPONENT)
            elif tensor.element_size() == 1:
                low = -127 if tensor.dtype == torch.int8 else 0  # no NaN of FP8
                tensor.view(torch.int8).random_(low, 127)
            elif "scales" in name:
                tensor.fill_(1e-4)
            elif tensor.numel() >= LEAST_WEIGHTS and tensor.is_floating_point():
                tensor.fill_(1) if tensor.dim() == 1 else tensor.normal_(0, 0.02)


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


def launcher(
    arch: str, smoke: bool, folder: Path, kernels: Path | None
) -> Callable[[LaunchPlan, dict[str, Any]], None]:
    """What runs plans: cubins of `kernels` or compiled here and now, or the interpreter."""
    if smoke:
        from kvgraph.kernels.run import run
        from tests.support.interpreter import mend

        mend()
        return run
    from kvgraph.runtime.sessions.cuda_gpu import CudaGpu

    if kernels is None:
        compile_kernels(arch, kernels := folder)
    return CudaGpu(kernels).launch


def compile_kernels(arch: str, folder: Path) -> None:
    from kvgraph.compiler.targets.cuda import save_kernels

    save_kernels(aot.compile_all(_variants(arch), arch), arch, folder)


def _variants(arch: str) -> Iterator[variants.Variant]:
    yield variants.store_variant(LLAMA_8B)
    for pool in ("bfloat16", *QUANTIZED):
        yield from variants.attention_variants(shape_of(pool), arch)
    yield from product_variants(arch)
    yield from (route_variant(ROUTES[name]) for name in NAMES)


SECTIONS = {
    "matrix": matrix,
    "tokens": tokens,
    "decode": decode,
    "quantized": quantized,
    "prefill": prefill,
    "linears": linears,
    "experts": experts,
    "routers": routers,
    "step": step,
}


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--only", default=",".join(SECTIONS))
    parser.add_argument("--json", type=Path)
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--compile", type=Path, help="write the kernels into this folder, and end")
    parser.add_argument("--arch", default="sm_90", help="for --compile")
    parser.add_argument("--kernels", type=Path, help="a folder that --compile wrote")
    parser.add_argument("--artifact", type=Path, help="what `step` runs")
    given = parser.parse_args()
    if given.compile:
        compile_kernels(given.arch, given.compile)
        return 0
    if not given.smoke and not torch.cuda.is_available():
        console.print("no NVIDIA GPU here: nothing was measured (--smoke checks this script)")
        return 1
    arch = "sm_90"
    if not given.smoke:
        arch = "sm_{}{}".format(*torch.cuda.get_device_capability())
        console.print(f"{torch.cuda.get_device_name()}, {arch}, torch {torch.__version__}")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        launch = launcher(arch, given.smoke, folder, given.kernels)
        run = Run(arch, given.smoke, folder, launch, given.artifact)
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
