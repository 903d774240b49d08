"""What a TensorRT engine takes to build where no GPU is: seconds, peak memory, bytes.

    python -m benchmarks.tensorrt [--shape llama-1b] [--targets sm_86,sm_89] [--dtype bfloat16]

One compile of a random checkpoint, in a process of its own. The baseline is the same compile's ONNX
half, which every backend pays; the goals are 10 minutes and 16 GiB. The reference
check: hashes of the artifact, the engine's bindings as the signature has them (compile refuses
others), every kernel image in the engine, and its weights, by size. The physical limit of an engine
is its weights: what it has besides them is printed.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.shapes import SHAPES

LIMIT_SECONDS, LIMIT_BYTES = 600, 16 << 30


def make_checkpoint(shape: str, dtype: str, folder: Path) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(
        "llama", **SHAPES[shape], bos_token_id=1, eos_token_id=2, dtype=dtype
    )
    torch.manual_seed(0)
    torch.set_default_dtype(getattr(torch, dtype))
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)


def compile_here(model: str, out: str, target: str) -> None:
    """In a process of its own: prints stages, and the peaks of this process and its builder."""
    import kvgraph

    stages: dict[str, float] = {}
    start, running = time.perf_counter(), ""

    def progress(stage: str) -> None:
        nonlocal start, running
        now = time.perf_counter()
        if running:
            stages[running] = round(now - start, 1)
        start, running = now, stage

    kvgraph.compile(model, out, backend="tensorrt", target=target, progress=progress)
    progress("")
    peaks = [
        resource.getrusage(who).ru_maxrss << 10
        for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    ]
    print(json.dumps({"stages": stages, "peaks": peaks}))


def check(out: Path) -> int:
    """Of the artifact's own hashes and its engine's contents; returns the weights' bytes."""
    from kvgraph.runtime.artifact import verify

    verify(out)
    engine = (out / "model.engine").read_bytes()
    for image in out.glob("kernels/*/*.cubin"):
        assert image.read_bytes() in engine, f"{image}: expected in the engine"
    weights = (out / "weights.safetensors").stat().st_size
    assert len(engine) > weights, "an engine holds its weights"
    return weights


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--shape", choices=SHAPES, default="llama-1b")
    parser.add_argument("--targets", default="sm_86,sm_89,sm_120")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--compile", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--make", nargs=3, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.make:
        make_checkpoint(given.make[0], given.make[1], Path(given.make[2]))
        return
    if given.compile:
        compile_here(*given.compile)
        return
    with tempfile.TemporaryDirectory() as scratch:
        folder, out = Path(scratch, "model"), Path(scratch, "artifact")
        bench = [sys.executable, "-m", "benchmarks.tensorrt"]
        # A process for the checkpoint, whose memory is not the compiler's.
        subprocess.run([*bench, "--make", given.shape, given.dtype, str(folder)], check=True)
        start = time.perf_counter()
        done = subprocess.run(
            [*bench, "--compile", str(folder), str(out), f"cuda:{given.targets}"],
            check=True, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        seconds = time.perf_counter() - start
        measured = json.loads(done.stdout.splitlines()[-1])
        weights, engine = check(out), (out / "model.engine").stat().st_size
    for stage, took in measured["stages"].items():
        print(f"{took:8.1f} s  {stage}")
    build = measured["stages"]["building the engine"]
    rest = sum(measured["stages"].values()) - build
    compiler, builder = measured["peaks"]
    print(f"{seconds:8.1f} s  in all: {seconds / LIMIT_SECONDS:.0%} of the limit")
    print(f"{build:8.1f} s  engine, and {rest:.1f} s of the rest (the baseline)")
    peak = compiler + builder  # at most: they overlap
    print(
        f"{compiler / 2**30:8.2f} GiB  peak of the compiler, {builder / 2**30:.2f} GiB of its "
        f"builder: together {peak / LIMIT_BYTES:.0%} of the limit"
    )
    print(
        f"{engine / 2**20:8.1f} MiB  engine, {weights / 2**20:.1f} MiB of weights: "
        f"{(engine - weights) / 2**20:.1f} MiB besides them"
    )
    ok = seconds <= LIMIT_SECONDS and peak <= LIMIT_BYTES
    print("within the limits" if ok else "OVER the limits")
    sys.exit(not ok)


if __name__ == "__main__":
    main()
