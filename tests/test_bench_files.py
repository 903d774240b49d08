"""What `kvgraph bench` prints and writes at its end, where a part of it fails."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from unittest import mock

from kvgraph.bench.limits import Gemm, Limits
from tests.support.command_line import run

Compiled = Callable[..., Path]

SMALL = ["--threads", "1", "--prompt", "24", "--new-tokens", "4", "--batches", "1"]
SMALL += ["--context", "", "--requests", "0", "--repeats", "1"]
READING = Limits(1e-3, 1, [Gemm("float32", "numpy", 1.0)], "no torch here")


def test_a_report_outlives_a_file_that_cannot_be_written(
    compiled: Compiled, tmp_path: Path
) -> None:
    """It is printed, and the picture drawn, when the folder of `--save` is gone behind the run."""
    gone, picture = tmp_path / "gone", tmp_path / "a.svg"
    gone.mkdir()

    def read(*_: object) -> Limits:
        shutil.rmtree(gone, ignore_errors=True)
        return READING

    options = ("--save", gone / "a.json", "--plot", picture)
    with mock.patch("kvgraph.bench.run.read_limits", read):
        outcome = run("bench", compiled("tiny-llama"), *SMALL, *options)
    assert outcome.code == 2
    assert "decode, batch 1 x 24" in outcome.out
    expected = f"{gone}/a.json: expected to write all of it, got 'No such file or directory'"
    assert outcome.err.splitlines()[-1] == f"kvgraph: {expected}"
    assert picture.exists()


def test_a_report_that_cannot_be_printed_is_saved(compiled: Compiled, tmp_path: Path) -> None:
    with (
        mock.patch("kvgraph.bench.run.read_limits", return_value=READING),
        mock.patch("kvgraph.bench.table.print_report", side_effect=OSError("a full disk")),
    ):
        outcome = run("bench", compiled("tiny-llama"), *SMALL, "--save", tmp_path / "a.json")
    assert outcome.code == 2
    assert outcome.err.splitlines()[-1] == "kvgraph: a full disk"
    assert len(json.loads((tmp_path / "a.json").read_text())["engines"]) == 1
