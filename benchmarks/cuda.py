"""Everything of the CUDA backend, checked and then timed on one GPU in one run.

    python -m benchmarks.cuda [--only matrix,tokens,decode,quantized,prefill,step] [--json FILE]

Correctness first: the conformance matrix, tokens against transformers in float32, attention
against float64. Then times, medians of replayed or repeated launches:
- decode attention as a share of the copy bandwidth measured here (bytes: K and V of every context),
  against torch's SDPA by FlashAttention and by cuDNN, each by name, and FlexAttention, all over
  contiguous K and V, which paging has not;
- the same over pools of int8 and float8 (bytes: theirs, with scales), against a bfloat16 pool;
- prefill in TFLOP/s (4 * pairs * heads * head_dim), against FlashAttention and cuDNN;
- a decode step of an 8B-shaped bf16 model with CUDA graphs, as a share of (weights + K and V) over
  that bandwidth. Its weights are zeros, which flatter the clocks of matrix products.
`--smoke` runs tiny sizes on Triton's interpreter, to check this script where there is no GPU.
"""

from __future__ import annotations

import argparse
import json
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

from benchmarks.cuda_attention import LLAMA_8B, QUANTIZED, decode, prefill, quantized, shape_of
from benchmarks.cuda_run import Run, console, copy_bandwidth, goal, median_us, wall_ms
from kvgraph.contract.inputs import ModelInputs
from kvgraph.kernels import aot, variants
from kvgraph.kernels.launch import LaunchPlan

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
        from tests.support.interpreter import mend

        mend()
        return run
    from kvgraph.compiler.targets.cuda import save_kernels
    from kvgraph.runtime.sessions.cuda_gpu import CudaGpu

    save_kernels(list(aot.compile_all(_variants(arch), arch)), arch, folder)
    return CudaGpu(folder).launch


def _variants(arch: str) -> Iterator[variants.Variant]:
    yield variants.store_variant(LLAMA_8B.cache, None)
    for pool in ("bfloat16", *QUANTIZED):
        yield from variants.attention_variants(shape_of(pool), arch)


SECTIONS = {
    "matrix": matrix,
    "tokens": tokens,
    "decode": decode,
    "quantized": quantized,
    "prefill": prefill,
    "step": step,
}


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
