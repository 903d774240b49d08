"""What a compile takes of a model that is larger than it: seconds, peak memory, allocations.

    python -m benchmarks.compile [--shape llama-8b] [--targets sm_80,sm_90,sm_120] [--twice]
    python -m benchmarks.compile --targets int8,int4 [--random] [--run]
    python -m benchmarks.compile --shape gpt-oss-20b --targets stored --random --run

A target is an architecture of CUDA, or `--weights` for cpu. Each compile is a process of its own,
whose cache the null manager describes with a pool of 60 GiB. The checkpoint is a sparse file of
zeros: as many bytes to read as real weights, and no disk; `--random` writes normal values. `--run`
loads what was compiled for cpu, and measures it with `kvgraph bench`.

Baselines are the same bytes copied by `cp`, and for cpu the same compile of layers that are almost
empty. Goals: 5 minutes and 8 GiB for CUDA; for cpu 3 GiB, and 1.5 times `cp` plus the almost
empty compile. The reference check is the compile's own check, and that a compile for CUDA asks for
no driver and no KV memory.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.shapes import GPT_OSS, SHAPES
from kvgraph.contract.dtypes import WEIGHTS
from kvgraph.ops.packed import MXFP4_GROUP

LIMITS = {"cuda": (300.0, 8 << 30), "cpu": (0.0, 3 << 30)}
"""Seconds and bytes; on cpu the baselines say the seconds."""
TIMES_CP = 1.5
EMPTY = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 64, "head_dim": 16}
EXPERTS, SCALES = (".experts.gate_up_proj", ".experts.down_proj"), "_scales"
SIZES = "--prompt 128 --new-tokens 32 --batches 1,8 --requests 0 --repeats 2"
POOL_BYTES, DATA_BYTES = 60 << 30, 16 << 30


def make_checkpoint(shape: str, folder: Path, **others: int) -> int:
    """A checkpoint of zeros without a block on disk, in bf16, and of gpt-oss with experts in MXFP4;
    returns its bytes."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    folder.mkdir()
    kind = "gpt_oss" if shape in GPT_OSS else "llama"
    given = (SHAPES | GPT_OSS)[shape] | others | {"dtype": "bfloat16"}
    ids = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None}
    config = AutoConfig.for_model(kind, **given, **ids)
    config.save_pretrained(folder)
    vars(config).pop("quantization_config", None)  # from_config would ask for its package
    with torch.device("meta"):
        parameters = dict(AutoModelForCausalLM.from_config(config).named_parameters())
    header, end = {}, 0
    for name, parameter in parameters.items():
        stored = {name: ("BF16", tuple(parameter.shape))}
        if name.endswith(EXPERTS):
            experts, inputs, outputs = parameter.shape
            blocks = experts, outputs, inputs // MXFP4_GROUP
            stored = {f"{name}_blocks": ("U8", (*blocks, MXFP4_GROUP // 2))}
            stored[f"{name}{SCALES}"] = "U8", blocks
        for own, (dtype, dims) in stored.items():
            offsets = [end, end := end + math.prod(dims) * (2 if dtype == "BF16" else 1)]
            header[own] = {"dtype": dtype, "shape": dims, "data_offsets": offsets}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(file.tell() + end)
    return end


def fill(folder: Path, nbytes: int) -> None:
    """Normal values in place of the zeros, the same ones again and again; scales of MXFP4 from
    2^-9 to 2^-6."""
    import torch

    from kvgraph.contract.safetensors import read_layout

    values = torch.randn(1 << 24, generator=torch.Generator().manual_seed(0)).mul_(0.02)
    block = values.bfloat16().view(torch.uint8).numpy().tobytes()
    with (folder / "model.safetensors").open("r+b") as file:
        file.seek(-nbytes, os.SEEK_END)
        for start in range(0, nbytes, len(block)):
            file.write(block[: nbytes - start])
        for name, tensor in read_layout(folder / "model.safetensors").items():
            if name.endswith(SCALES):
                file.seek(tensor.offset)
                file.write(bytes(range(118, 122)) * (math.prod(tensor.shape) // 4))


def run(artifact: Path) -> None:
    """Load and decode, next to what the machine reads and multiplies."""
    sizes = [*SIZES.split(), "--context", ""]
    command = [sys.executable, "-m", "kvgraph", "bench", artifact, *sizes]
    subprocess.run(command, check=True)


def compile_here(model: Path, out: Path, target: str) -> None:
    """In this process, which may not have the pool's bytes: compile, and print what it took.

    Memory that is only reserved counts against the limit as memory that is written does.
    """
    import torch

    from kvgraph import build
    from kvgraph.compiler import pipeline

    resource.setrlimit(resource.RLIMIT_DATA, (DATA_BYTES, DATA_BYTES))
    made: list[Any] = []

    class PretendedPool(pipeline.NullKVCacheManager):
        def __init__(self, *given: Any, **named: Any) -> None:
            super().__init__(*given, **named | {"available_cache_memory": POOL_BYTES})
            made.append(self)

    pipeline.NullKVCacheManager = PretendedPool  # type: ignore[misc]
    start, stages = time.perf_counter(), []

    def progress(stage: str) -> None:
        stages.append((stage, time.perf_counter() - start))

    on_cpu = target in WEIGHTS
    options = {"weights": target} if on_cpu else {"target": f"cuda:{target}"}
    build.compile(model, out, progress=progress, force=True, **options)
    seconds = time.perf_counter() - start
    ends = [at for _, at in stages[1:]] + [seconds]
    assert [manager.available_cache_memory for manager in made] == [POOL_BYTES]
    found = {
        "seconds": seconds,
        "stages": {stage: end - at for (stage, at), end in zip(stages, ends, strict=True)},
        "allocators": [
            name for name in sys.modules if name.startswith("kvgraph.runtime") and not on_cpu
        ],
        "driver": "libcuda.so" in Path("/proc/self/maps").read_text(),
        "device": torch.cuda.is_initialized(),
    }
    print(json.dumps(found))


def measured(model: Path, out: Path, target: str) -> dict[str, Any]:
    """A process that compiles: what it says, and its peak resident memory with its children's."""
    bench = [sys.executable, "-m", "benchmarks.compile"]
    command = [*bench, "--compile", str(model), str(out), target]
    with tempfile.TemporaryFile() as said:
        process = subprocess.Popen(command, stdout=said)
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        said.seek(0)
        if process.returncode:
            raise SystemExit(f"compile for {target} ended with {process.returncode}")
        found: dict[str, Any] = json.loads(said.read().splitlines()[-1])
    return found | {"peak": usage.ru_maxrss * 1024, "processor": usage.ru_utime + usage.ru_stime}


def report(what: str, taken: dict[str, Any], nbytes: int, limits: tuple[float, int]) -> None:
    seconds, peak = taken["seconds"], taken["peak"]
    print(
        f"{what:24} {seconds:7.1f} s ({seconds / limits[0]:4.0%} of the limit)   "
        f"peak {peak / 2**30:5.2f} GiB ({peak / limits[1]:4.0%} of the limit, "
        f"{peak / max(nbytes, 1):4.2f} of the weights)   "
        f"processor {taken['processor']:6.1f} s"
    )
    asked = [name for name in ("allocators", "driver", "device") if taken[name]]
    print(f"    KV bytes and device bytes asked for: {asked or 0}")
    for stage, took in taken["stages"].items():
        print(f"    {took:7.1f} s  {stage}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--shape", choices=[*SHAPES, *GPT_OSS], default="llama-8b")
    parser.add_argument("--targets", default="sm_80,sm_90,sm_120")
    parser.add_argument("--random", action="store_true", help="weights that are not zeros")
    parser.add_argument("--run", action="store_true", help="run what was compiled for cpu")
    parser.add_argument("--twice", action="store_true", help="compile again, compare manifests")
    parser.add_argument("--folder", type=Path, help="for checkpoint and artifact; emptied behind")
    parser.add_argument("--compile", nargs=3, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.compile:
        model, out, target = given.compile
        compile_here(Path(model), Path(out), target)
        return
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        model, out = Path(folder) / "model", Path(folder) / "out"
        nbytes = make_checkpoint(given.shape, model)
        if given.random:
            fill(model, nbytes)
        print(f"{given.shape}: {nbytes / 1e9:.1f} GB of weights, {os.cpu_count()} cores")
        start = time.perf_counter()
        subprocess.run(
            ["cp", "--sparse=never", model / "model.safetensors", Path(folder) / "copy"], check=True
        )
        copied = time.perf_counter() - start
        print(f"{'baseline: cp':24} {copied:7.1f} s")
        (Path(folder) / "copy").unlink()
        make_checkpoint(given.shape, Path(folder) / "empty", **EMPTY)
        for target in given.targets.split(","):
            limits = LIMITS["cuda"]
            if target in WEIGHTS:
                empty = measured(Path(folder) / "empty", out, target)["seconds"]
                print(f"{'baseline: empty, ' + target:24} {empty:7.1f} s")
                limits = empty + TIMES_CP * copied, LIMITS["cpu"][1]
            report(target, measured(model, out, target), nbytes, limits)
            if given.twice:
                first = (out / "manifest.json").read_bytes()
                shutil.rmtree(out)
                measured(model, out, target)
                same = first == (out / "manifest.json").read_bytes()
                print(f"    compiled again: {'the same manifest' if same else 'ANOTHER manifest'}")
            if given.run and target in WEIGHTS:
                run(out)
            shutil.rmtree(out)


if __name__ == "__main__":
    main()
