"""What a compile says of the memory that a step will ask for."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

import kvgraph
from kvgraph.compiler import step_memory


@pytest.mark.parametrize(("model", "is_large"), [("mixtral", True), ("tiny-llama", False)])
def test_a_step_that_gathers_experts_is_named(
    model_folder: Callable[[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    model: str,
    is_large: bool,
) -> None:
    """A token of mixtral has two experts, each with a gate and an up projection in one."""
    monkeypatch.setattr(step_memory, "LARGE", 32 << 20)
    folder = model_folder(model)
    made = kvgraph.compile(folder, tmp_path / "out", check=False)
    notes = [note for note in made.notes if note.startswith("memory: a step of 2048 new tokens")]
    assert len(notes) == is_large
    if is_large:
        config = json.loads((folder / "config.json").read_text())
        weights = 2 * config["intermediate_size"] * config["hidden_size"] * 4
        nbytes = 2048 * config["num_experts_per_tok"] * weights
        assert f"a tensor of {nbytes / 2**30:.1f} GiB (aten.index.Tensor; " in notes[0]
