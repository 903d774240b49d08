"""A mixture of experts in bf16, int8 and int4, next to other engines, in one run.

    python -m benchmarks.mixture [--folder DIR] [--save FILE] [options of kvgraph bench]

Method: a random Qwen3-MoE of 913M parameters in bfloat16, the same one in every run, is compiled
three times. `kvgraph bench` measures the artifacts, and the peers of `--peers NAME=PYTHON`, without
other contexts than `--prompt`. DIR (default: a temporary folder) gets `model`, the artifacts and
`peers`, the folder of --peer-models. A `model` that is there is used as it is, so that peers need
not convert it again; the artifacts are compiled again. llama.cpp's converter refuses a tokenizer
that it does not know. So its GGUF files are written here, without one: all matrices but the routers
in q8_0 or q4_0.

The last table compares each artifact with the goals: decode at batch 1 reads its active bytes at
75 % of the read limit; the peak of resident memory is at most weights, pool and 150 MB; and it is
faster than the best peer of its class in every figure. Weights are mapped: experts that no token
chose are not resident, and small runs show too little memory.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.start import TINY_LLAMA
from kvgraph.bench.peers import llama_cpp
from tests.support import gguf_files
from tests.support.models import make_model

SHAPE: dict[str, Any] = {
    "vocab_size": 32_000,
    "hidden_size": 1024,
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "num_experts": 32,
    "moe_intermediate_size": 512,
    "num_experts_per_tok": 4,
    "norm_topk_prob": True,
    "max_position_embeddings": 4096,
    "initializer_range": 0.02,
}
POOLS = {"bf16": "bfloat16", "int8": "int8", "int4": "int8"}
"""Type of the pool by class of weights, which is the artifact's name too."""

SHARE, MEMORY, RATIO = 0.75, 150.0, 1.0
"""Goals: share of the read limit, MB without weights and pool, ratio to the best peer."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--folder", type=Path, help="kept; 6 GB without peers [default: temporary]")
    parser.add_argument("--save", type=Path, help="the figures [default: bench.json in the folder]")
    args, options = parser.parse_known_args()
    with contextlib.ExitStack() as stack:
        folder = args.folder or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        save = args.save or folder / "bench.json"
        measure(folder, save, options)
        print(f"\n{table(json.loads(save.read_bytes()))}")


def measure(folder: Path, save: Path, options: list[str]) -> None:
    """Write and compile the model in `folder`, and run `kvgraph bench`, which prints its table."""
    model = folder / "model"
    if not (model / "tokenizer.json").is_file():  # it is written last
        make_model("qwen3_moe", model, dtype="bfloat16", **SHAPE)
        for name in ("tokenizer_config.json", "tokenizer.json"):
            shutil.copyfile(TINY_LLAMA / name, model / name)
    if any(each.removeprefix("--peers=").startswith("llama.cpp") for each in options):
        write_gguf(model, folder / "peers")
    for weights, pool in POOLS.items():
        given = ["--weights", weights, "--cache-dtype", pool, "--no-quality", "--force"]
        kvgraph("compile", model, "-o", folder / weights, *given)
    given = ["--model", model, "--peer-models", folder / "peers", "--context", "", *options]
    kvgraph("bench", *(folder / weights for weights in POOLS), *given, "--save", save)


def write_gguf(model: Path, folder: Path) -> None:
    """Write `model` as the peer llama.cpp expects it in `folder`; files that are there stay."""
    folder.mkdir(exist_ok=True)
    for weights in ("int8", "int4"):
        kind = llama_cpp.KINDS[weights]
        out, partial = folder / f"llama.cpp-{kind}.gguf", folder / "partial"
        if not out.is_file():
            gguf_files.make(model, partial, kind.upper(), text={"model": "none"}).rename(out)


def kvgraph(*arguments: str | Path) -> None:
    """Run a command of kvgraph in a process of its own, so that this one stays small."""
    done = subprocess.run([sys.executable, "-m", "kvgraph", *arguments])
    if done.returncode:
        raise SystemExit(done.returncode)


def table(report: dict[str, Any]) -> str:
    """Compare a report of `kvgraph bench --save` with the goals; "-" for what was not measured."""
    rows = [
        ["", "of read limit, batch 1", "other memory, MB", "least ratio to peers"],
        ["goal", f">= {SHARE:.0%}", f"<= {MEMORY:.0f}", f"> {RATIO:g}"],
    ]
    for engine in (each for each in report["engines"] if each["ours"]):
        figures = [each for each in report["figures"] if each["engine"] == engine["name"]]
        shares = [
            each["share"]
            for each in figures
            if each["what"] == "decode" and each["case"].startswith("batch 1 x") and each["share"]
        ]
        weights = report["counts"][engine["name"]]["file_bytes"]
        memory = (engine["peak_rss_bytes"] - weights - engine["pool_bytes"]) / 1e6
        ratios = [each["ratio"] for each in figures if each["ratio"]]
        share = f"{shares[0]:.0%}" if shares else "-"
        ratio = f"{min(ratios):.2f}" if ratios else "-"
        rows.append([engine["name"], share, f"{memory:.0f}", ratio])
    return "\n".join(
        f"{name:10}{''.join(f'{cell:>24}' for cell in cells)}" for name, *cells in rows
    )


if __name__ == "__main__":
    main()
