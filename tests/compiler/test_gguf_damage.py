"""GGUF files whose header or fields are damaged, or say what no model has."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvgraph
from kvgraph.errors import KVGraphError, ModelError, UnsupportedError
from tests.support import gguf_files

Folders = Callable[[str], Path]

STRING, ARRAY, UINT8, UINT32 = 8, 9, 0, 4
"""GGUF's numbers of types of values."""


def refused(path: Path, kind: type[KVGraphError]) -> str:
    with pytest.raises(KVGraphError) as error:
        kvgraph.compile(path, path.with_name("out"), check=False)
    assert type(error.value) is kind
    assert not path.with_name("out").exists()
    return str(error.value)


def text(said: str) -> bytes:
    return struct.pack("<Q", len(said)) + said.encode()


def header(tensors: int, fields: int) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, tensors, fields)


def field_of(type_: int, value: bytes) -> bytes:
    return text("general.x") + struct.pack("<I", type_) + value


SHORT = {
    "a list of bytes": header(0, 1) + field_of(ARRAY, struct.pack("<IQ", UINT8, 1 << 20)),
    "a list of lists": header(0, 1) + field_of(ARRAY, struct.pack("<IQ", ARRAY, 1 << 20)),
    "a list of texts": header(0, 1) + field_of(ARRAY, struct.pack("<IQ", STRING, 1 << 20)),
    "a text": header(0, 1) + field_of(STRING, struct.pack("<Q", 1 << 20)),
    "a number": header(0, 1) + field_of(UINT32, b""),
    "fields": header(0, 1 << 20),
    "tensors": header(1 << 20, 0),
}


@pytest.mark.parametrize("what", SHORT)
def test_more_is_said_to_follow_than_the_file_has(what: str, tmp_path: Path) -> None:
    """The gguf package would add an element for each that is said to follow: 2**40, with memory for
    each, if a file says so."""
    path = tmp_path / "model.gguf"
    path.write_bytes(SHORT[what])
    assert refused(path, ModelError) == f"{path}: expected a GGUF file, {gguf_files.DAMAGED}"


@pytest.mark.parametrize("offset", [(1 << 64) - 32, 1 << 63, 1 << 40])
def test_a_tensor_outside_of_the_file(offset: int, tmp_path: Path) -> None:
    """The first offset, added to the header's length, is a place in the header in 64 bits."""
    path = tmp_path / "model.gguf"
    tensor = text("a") + struct.pack("<IQIQ", 1, 4, 0, offset)
    path.write_bytes(header(1, 0) + tensor.ljust(104, b"\0") + bytes(64))
    with np.errstate(over="ignore"):
        found = refused(path, ModelError)
    assert found == f"{path}: expected a GGUF file, {gguf_files.DAMAGED}"


BAD = b"ab\xff\xfe"


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"general__architecture": BAD}, "general.architecture"),
        ({"llama__rope__scaling__type": BAD}, "llama.rope.scaling.type"),
        ({"llama__block_count": BAD}, "llama.block_count"),
        ({"text": gguf_files.byte_level("gpt-2", {}) | {"pre": BAD}}, "tokenizer.ggml.pre"),
        ({"text": gguf_files.sentencepiece() | {"tokens": [BAD, "a"]}}, "tokenizer.ggml.tokens"),
        (
            {"text": gguf_files.byte_level("gpt-2", {}) | {"merges": ["a b", BAD]}},
            "tokenizer.ggml.merges",
        ),
    ],
)
def test_text_that_is_not_utf_8(
    fields: dict[str, Any], name: str, model_folder: Folders, tmp_path: Path
) -> None:
    path = gguf_files.make(model_folder("llama"), tmp_path / "model.gguf", **fields)
    said = f"{path}: {name}: expected text in UTF-8, got {BAD!r}; compile the checkpoint that it "
    assert refused(path, ModelError).startswith(said)


def test_text_that_nothing_reads_may_be_in_another_encoding(
    model_folder: Folders, tmp_path: Path
) -> None:
    path = gguf_files.make(model_folder("llama"), tmp_path / "model.gguf", general__author=BAD)
    kvgraph.compile(path, tmp_path / "out", check=False)


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("attention__key_length", math.nan, "a whole number, got nan"),
        ("attention__key_length", 16.0, "a whole number, got 16.0"),
        ("attention__head_count", True, "a whole number, got True"),
        ("attention__sliding_window", math.nan, "a whole number, got nan"),
        ("attention__layer_norm_rms_epsilon", math.inf, "a finite number, got inf"),
        ("attention__layer_norm_rms_epsilon", "small", "a finite number, got 'small'"),
        ("rope__freq_base", math.inf, "a finite number, got inf"),
        ("rope__scaling__factor", math.inf, "a finite number, got inf"),
        ("rope__scale_linear", math.nan, "a finite number, got nan"),
        ("rope__scaling__type", ["yarn"], "text, got ['yarn']"),
        ("attention__causal", 1, "true or false, got 1"),
        ("vocab_size", [1, 2], "a whole number, got [1, 2]"),
    ],
)
def test_a_field_of_another_kind(
    field: str, value: Any, expected: str, model_folder: Folders, tmp_path: Path
) -> None:
    fields = {f"llama__{field}": value}
    path = gguf_files.make(model_folder("llama"), tmp_path / "model.gguf", **fields)
    said = f"{path}: llama.{field.replace('__', '.')}: expected {expected}; compile the checkpoint "
    assert refused(path, UnsupportedError).startswith(said)


@pytest.mark.parametrize(
    ("name", "value"),
    [("split__count", math.inf), ("general__sampling__temp", math.nan), ("general__type", ["a"])],
)
def test_a_field_of_every_file_of_another_kind(
    name: str, value: Any, model_folder: Folders, tmp_path: Path
) -> None:
    path = gguf_files.make(model_folder("llama"), tmp_path / "model.gguf", **{name: value})
    said = f"{path}: {name.replace('__', '.')}: expected "
    assert refused(path, UnsupportedError).startswith(said)


def test_a_field_of_sampling_out_of_range(model_folder: Folders, tmp_path: Path) -> None:
    fields = {"general__sampling__temp": -1.0}
    path = gguf_files.make(model_folder("llama"), tmp_path / "model.gguf", **fields)
    said = refused(path, ModelError)
    assert said.startswith(f"{path}: general.sampling.temp: expected ")
    assert said.endswith("got -1.0; correct or remove it")
