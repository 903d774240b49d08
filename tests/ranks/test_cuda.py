"""Ranks of a CUDA artifact: compiled without a GPU, run by two processes on the interpreter."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import kvgraph
from kvgraph.contract.manifest import read_manifest
from kvgraph.errors import RankError
from kvgraph.runtime.artifact import Artifact
from tests.support.ports import free_port
from tests.support.ranks import environment

pytest.importorskip("triton", reason="compiles the kernels: pip install 'kvgraph[cuda]'")

from tests.runtime.test_cuda_session import (
    ENGINE,
    PROMPTS,
    ROOT,
    eager,
    old_interpreter,
)


@pytest.fixture(scope="module")
def two(compiled: Callable[..., Path]) -> Path:
    return compiled("tiny-llama", None, target="cuda:sm_90", dtype="float32", tp=2)


def test_files(two: Path) -> None:
    """Ranks share the program and the kernels."""
    manifest = read_manifest(two)
    assert [n for n in manifest.files if n.startswith("rank1/")] == ["rank1/weights.safetensors"]
    assert manifest.ops["kvgraph.all_reduce"] == 9
    assert manifest.nondeterministic_files == ["build.json"]


def test_weights_of_a_rank_are_read_from_their_place(
    two: Path, compiled: Callable[..., Path]
) -> None:
    """A checkpoint that is never in memory gives what one in memory gives."""
    import torch
    from safetensors.torch import load_file

    whole = load_file(
        compiled("tiny-llama", None, target="cuda:sm_90", dtype="float32") / "weights.safetensors"
    )
    parts = [load_file(two / name) for name in ("weights.safetensors", "rank1/weights.safetensors")]
    cut = 0
    for name, expected in whole.items():
        shares = [part[name] for part in parts]
        if shares[0].shape == expected.shape:
            assert torch.equal(shares[0], expected)
            assert torch.equal(shares[1], expected)
            continue
        dim = next(d for d in range(2) if shares[0].shape[d] != expected.shape[d])
        assert torch.equal(torch.cat(shares, dim), expected), name
        cut += 1
    assert cut == 4 * 7 + 1


@pytest.mark.slow
@old_interpreter
def test_tokens_equal_eager(two: Path, model_folder: Callable[[str], Path], tmp_path: Path) -> None:
    """Chunked prefill, mixed steps, and decode steps that both ranks capture and replay."""
    request = tmp_path / "request.json"
    request.write_text(
        json.dumps({"engine": ENGINE, "arch": "sm_90", "prompts": PROMPTS, "new_tokens": 4})
    )
    command = [sys.executable, "-m", "tests.ranks.interpreted", str(two), str(request)]
    run = f"interpreted-{os.getpid()}"
    ranks = [
        subprocess.Popen(
            command,
            cwd=ROOT,
            env=os.environ | environment(rank, 2, run) | {"TRITON_INTERPRET": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    outcomes = [(*rank.communicate(timeout=600), rank.returncode) for rank in ranks]
    assert [(err, code) for _, err, code in outcomes] == [("", 0), ("", 0)]
    found = json.loads(outcomes[0][0])
    assert found["tokens"] == eager(model_folder("tiny-llama"), PROMPTS, 4)
    assert found["captures"] >= 1
    assert found["replays"] >= 2


def test_a_gpu_for_each_rank_needs_torchrun(two: Path) -> None:
    artifact = Artifact(two, read_manifest(two))
    with pytest.raises(
        RankError, match=r"expected 2 processes, a GPU for each, got one; .*torchrun"
    ):
        artifact.session()


def test_tiers_of_pools_that_stay_on_their_gpus_are_refused(two: Path) -> None:
    from kvgraph.contract.inputs import Buffer
    from kvgraph.errors import DeviceError
    from kvgraph.kv.tiers.copies import copier_of

    symbol = next(
        s for s in kvgraph.runtime.artifact.verify(two).signature.inputs if s.kind == "buffer"
    )
    remote = Buffer(symbol.dtype, (1,), symbol.device)
    with pytest.raises(DeviceError, match=r"tiers: expected a session that copies pages of cuda:0"):
        copier_of(object(), [remote])


@pytest.mark.slow
def test_check_runs_the_programs_of_all_ranks(
    model_folder: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rank whose part of a weight is another's is found before anything is written."""
    from kvgraph.compiler.checkpoint import Share
    from kvgraph.errors import CheckError

    options = {"target": "cuda:sm_90", "tp": 2, "page_size": 16}
    manifest = kvgraph.compile(model_folder("llama"), tmp_path / "good", **options)
    assert manifest.notes[-1].startswith("check: logits of two ragged rows")
    whole = Share.of
    monkeypatch.setattr(
        Share, "of", lambda self, x: whole(Share(self.dim, self.parts, self.ranks, 0), x)
    )
    with pytest.raises(CheckError, match=r"check of 'llama': expected the logits of its own"):
        kvgraph.compile(model_folder("llama"), tmp_path / "bad", **options)
    assert not (tmp_path / "bad").exists()


GLOO = """
import sys, torch, torch.distributed as dist
from kvgraph.runtime.sessions import nccl
rank, port = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
x = [torch.arange(6.0).reshape(2, 3) + 10 * r for r in range(2)]
residual = torch.full((2, 3), 0.5)
before = x[rank].clone()
assert torch.equal(nccl.all_reduce(x[rank], residual, ranks=2), x[0] + x[1] + 0.5)
assert torch.equal(nccl.all_reduce(x[rank], ranks=2), x[0] + x[1])
assert torch.equal(x[rank], before)
assert torch.equal(nccl.all_gather(x[rank], ranks=2, out_width=6), torch.cat(x, 1))
dist.destroy_process_group()  # its threads cannot end with the interpreter
"""


def test_collectives_of_torch_distributed() -> None:
    """The functions behind the ops on CUDA, with gloo in place of NCCL."""
    port = str(free_port())
    command = [sys.executable, "-c", GLOO]
    ranks = [
        subprocess.Popen([*command, str(rank), port], stderr=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    for rank in ranks:
        _, said = rank.communicate(timeout=120)
        assert rank.returncode == 0, said
