"""GGUF models of several files: the first has the fields, each has a part of the tensors."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from kvgraph.compiler.frontends.gguf import as_folder
from tests.compiler.test_gguf_architectures import TEXT, loaded, refused
from tests.support import gguf_files
from tests.support.models import make_model


@pytest.fixture
def parts(tmp_path: Path) -> list[Path]:
    folder = make_model("llama", tmp_path / "model", vocab_size=258)
    gguf_files.make(folder, tmp_path / "model.gguf", text=TEXT, most_tensors=8)
    return sorted(tmp_path.glob("*.gguf"))


def test_weights_and_text_of_all_parts(parts: list[Path]) -> None:
    assert len(parts) > 2
    with as_folder(parts[0]) as folder:
        weights = loaded(folder)
        assert (folder / "tokenizer.json").is_file()
    for tensor, value in loaded(parts[0].with_name("model")).items():
        assert torch.equal(weights[tensor], value), tensor


def test_a_later_part(parts: list[Path]) -> None:
    count = len(parts)
    assert refused(parts[1]) == (
        f"{parts[1]}: expected the first part of a GGUF file, model-00001-of-{count:05}.gguf, got "
        f"part 2 of {count}; give that file, with the other parts in its folder"
    )


def test_a_later_part_by_the_name_of_the_first(parts: list[Path]) -> None:
    shutil.copy(parts[1], parts[0])
    assert refused(parts[0]) == (
        f"{parts[0]}: expected part 1 of {len(parts)}, as its name says, got part 2; copy the "
        "first part there"
    )


def test_a_part_with_another_name(parts: list[Path]) -> None:
    other = parts[0].rename(parts[0].with_name("other.gguf"))
    assert f"the first part of a GGUF file, other-00001-of-{len(parts):05}.gguf" in refused(other)


def test_a_part_that_is_missing(parts: list[Path]) -> None:
    parts[-1].unlink()
    assert refused(parts[0]) == (
        f"{parts[0]}: expected {len(parts)} parts in one folder, got no {parts[-1].name}"
    )


def test_a_part_that_is_twice_there(parts: list[Path]) -> None:
    shutil.copy(parts[1], parts[2])
    assert refused(parts[0]) == (f"{parts[2]}: expected part 3 of {parts[0].name}, got another")


def test_a_part_that_is_cut(parts: list[Path]) -> None:
    parts[1].write_bytes(parts[1].read_bytes()[:100])
    assert refused(parts[0]) == f"{parts[1]}: expected a GGUF file, {gguf_files.DAMAGED}"
