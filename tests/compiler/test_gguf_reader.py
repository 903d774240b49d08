"""Fields of a GGUF file: those that the gguf package reads, in fewer parts."""

from __future__ import annotations

from pathlib import Path

import gguf
import pytest

from kvgraph.compiler.frontends.gguf_reader import Reader

LISTS = {
    "texts": ["", "a", "é", "long " * 50],
    "numbers": [1, -2, 3],
    "fractions": [0.5, 1.25],
    "flags": [True, False, True],
    "one": ["x"],
}


@pytest.mark.parametrize("order", list(gguf.GGUFEndian))
def test_lists_are_those_that_the_package_reads(tmp_path: Path, order: gguf.GGUFEndian) -> None:
    path = written(tmp_path, order)
    ours, theirs = Reader(path), gguf.GGUFReader(path)
    assert list(ours.fields) == list(theirs.fields)
    for name, field in theirs.fields.items():
        assert ours.fields[name].contents() == field.contents(), name
        assert ours.fields[name].types == field.types, name
    assert {name: ours.fields[name].contents() for name in LISTS} == LISTS
    assert ours.data_offset == theirs.data_offset


@pytest.mark.parametrize("size", [2**20, 2**63])
@pytest.mark.parametrize("place", ["list", "text"])
def test_a_list_or_text_longer_than_the_file_is_refused(
    tmp_path: Path, place: str, size: int
) -> None:
    path = written(tmp_path, gguf.GGUFEndian.LITTLE)
    data = bytearray(path.read_bytes())
    at = data.index(b"texts") + len("texts") + 4 + 4 + 8 * (place == "text")
    data[at : at + 8] = size.to_bytes(8, "little")
    path.write_bytes(data)
    with pytest.raises(ValueError, match="expected a text up to byte"):
        Reader(path)


def written(folder: Path, order: gguf.GGUFEndian) -> Path:
    path = folder / "model.gguf"
    writer = gguf.GGUFWriter(path, "llama", endianess=order)
    for name, entries in LISTS.items():
        writer.add_array(name, entries)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
