"""Open a GGUF file, read its fields, and refuse what compile cannot take."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from kvgraph.compiler.checkpoint_files import CONFIG, require_fetched
from kvgraph.compiler.frontends.gguf_fields import (
    SAMPLING,
    SPLIT,
    WHOLE,
    Scalar,
    contents,
    entries,
    field,
    refuse,
    require_kinds,
)
from kvgraph.compiler.frontends.stored_forms import GGUF_BLOCKS
from kvgraph.compiler.joined_forms import PLAIN_BITS, kept_in
from kvgraph.compiler.quiet import first_line, quiet_loggers
from kvgraph.contract.generation import GENERATION
from kvgraph.contract.leftovers import scratch
from kvgraph.contract.loading import require_package
from kvgraph.errors import KVGraphError, ModelError, UnsupportedError
from kvgraph.signal_handlers import reraise_if_signalled

if TYPE_CHECKING:
    from gguf import GGMLQuantizationType, ReaderTensor

    from kvgraph.compiler.frontends.gguf_reader import Reader

NORMAL, CONTROL, USER_DEFINED = 1, 3, 4
"""GGUF token types. The last two are matched in a text before it is split."""

PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")
"""The name of a file that is a part: number and count of parts."""

UNKNOWN_TYPE = re.compile(r"(\d+)\)? is not a valid GGMLQuantizationType")
"""The gguf package's message for a tensor type that it does not know."""


@contextmanager
def told_of(path: Path, folder: str) -> Iterator[None]:
    """Make errors name the GGUF file `path` and its fields, not the temporary `folder` or its
    configuration files."""
    try:
        yield
    except KVGraphError as error:
        if folder not in str(error):
            raise
        said = str(error).replace(f"{folder}/{CONFIG}", str(path))
        for own, name in SAMPLING.items():
            said = said.replace(f"{folder}/{GENERATION}: {name}", f"{path}: {own}")
        said = said.replace(folder, str(path))
        raise type(error)(said) from error


def open_file(path: Path) -> Reader:
    """Open a GGUF file. If it is the first of several parts, the tensors of the others are added.

    ModelError: a file is damaged, or a part is missing or of another model. UnsupportedError: the
    byte order is not this machine's, the gguf package does not know a tensor's type, or `path` is a
    later part.
    """
    reader = _open(path)
    require_kinds(path, reader, dict.fromkeys(SPLIT, WHOLE))
    number, count, _ = (int(field(reader, name) or 0) for name in SPLIT)
    if count < 2:
        return reader
    named = PART.fullmatch(path.name)
    if named is None or int(named[3]) != count or number or int(named[2]) != 1:
        first = f"{named[1] if named else path.stem}-00001-of-{count:05}.gguf"
        if path.name == first:
            raise ModelError(
                f"{path}: expected part 1 of {count}, as its name says, got part {number + 1}; "
                "copy the first part there"
            )
        raise UnsupportedError(
            f"{path}: expected the first part of a GGUF file, {first}, got part {number + 1} of "
            f"{count}; give that file, with the other parts in its folder"
        )
    for place in range(1, count):
        other = path.with_name(f"{named[1]}-{place + 1:05}-of-{count:05}.gguf")
        if not other.is_file():
            raise ModelError(f"{path}: expected {count} parts in one folder, got no {other.name}")
        part = _open(other)
        if [field(part, name) for name in SPLIT] != [place, count, field(reader, SPLIT[2])]:
            raise ModelError(f"{other}: expected part {place + 1} of {path.name}, got another")
        reader.tensors.extend(part.tensors)
    names = {tensor.name for tensor in reader.tensors}
    if len(names) != field(reader, SPLIT[2]):
        raise ModelError(
            f"{path}: {SPLIT[2]}: expected that of its parts, {len(names)}, got "
            f"{field(reader, SPLIT[2])}"
        )
    return reader


def _open(path: Path) -> Reader:
    for name in ("transformers", "gguf"):
        require_package(name, "needed to read a GGUF file", "pip install 'kvgraph[compile]'")
    from kvgraph.compiler.frontends.gguf_reader import Reader

    require_fetched([path])
    try:
        reader = Reader(path)
    except Exception as error:  # the reader validates nothing, so a damaged file raises any error
        reraise_if_signalled(error)
        unknown = UNKNOWN_TYPE.search(str(error))
        if unknown is not None:
            wanted = "one that the gguf package knows"
            raise refuse(path, "type of a tensor", wanted, f"number {unknown[1]}") from error
        raise ModelError(
            f"{path}: expected a GGUF file, got a damaged one; copy or download it again"
        ) from error
    if reader.byte_order != "I":
        raise UnsupportedError(
            f"{path}: expected a little-endian GGUF file, got a big-endian one; convert it with "
            "gguf-convert-endian FILE little"
        )
    return reader


def is_decoded(kind: GGMLQuantizationType) -> bool:
    """Whether the gguf package decodes blocks of this type."""
    from gguf import GGML_QUANT_SIZES, dequantize

    try:
        dequantize(np.zeros(GGML_QUANT_SIZES[kind][1], np.uint8), kind)
    except NotImplementedError:
        return False
    return True


def nearest_bits(tensor: ReaderTensor) -> int:
    """Bits of the packed weights that are nearest to the tensor's form, or to its bits per element:
    4, 8, or 16 for floats."""
    form = GGUF_BLOCKS.get(tensor.tensor_type.name)
    if form is not None:
        return kept_in(form).bits
    bits = 8 * int(tensor.n_bytes) / max(1, int(tensor.n_elements))
    return 4 if bits < 5.5 else 8 if bits < 10 else PLAIN_BITS


@dataclass(frozen=True)
class Metadata:
    """The fields of a file's architecture, `kind`; their names are without it."""

    path: Path
    reader: Reader
    kind: str

    def get(self, name: str) -> Scalar:
        return field(self.reader, f"{self.kind}.{name}")

    def has(self, tensor: str) -> bool:
        """Whether the file has a tensor of this name."""
        return any(each.name == tensor for each in self.reader.tensors)

    def rows(self, tensor: str) -> int:
        """Rows of a matrix that must be present."""
        for each in self.reader.tensors:
            if each.name == tensor:
                return int(each.shape[-1])
        raise refuse(self.path, tensor, "a matrix", "none")

    def number(self, name: str, default: float) -> float:
        """The number of a field that `require_fields` has checked."""
        given = self.get(name)
        return float(default if given is None else given)

    def required(self, name: str) -> float | int:
        """The number of a field that must be present."""
        given = self.get(name)
        if not isinstance(given, int | float):
            raise self.refuse(name, "a number")
        return given

    def require(self, name: str, plain: float) -> None:
        """Raise UnsupportedError if a field is present and is not about `plain`."""
        given = self.get(name)
        if given is None:
            return
        is_close = isinstance(given, int | float) and math.isclose(
            given, plain, rel_tol=1e-5, abs_tol=1e-30
        )
        if not is_close:  # it may be a list too
            raise self.refuse(name, f"{plain:g}")

    def refuse(self, name: str, expected: str) -> UnsupportedError:
        given = self.get(name)
        got = "none" if given is None else repr(given)
        return refuse(self.path, f"{self.kind}.{name}", expected, got)


@contextmanager
def converting(path: Path, what: str) -> Iterator[None]:
    """Raise ModelError for what fails while transformers makes `what` of the file."""
    try:
        yield
    except Exception as error:
        reraise_if_signalled(error)
        raise ModelError(f"{path}: cannot read the {what}: {first_line(error)}") from error


@contextmanager
def alone(path: Path, header: bytes | None = None) -> Iterator[Path]:
    """A temporary folder with only a link to the file, in which transformers reads the tokenizer.

    In the file's own folder it would prefer a tokenizer.json to the file's tokenizer. `header`:
    what transformers reads in place of the file. ModelError if it cannot be read.
    """
    with quiet_loggers("transformers"), scratch("gguf") as folder:
        if header is None:
            (folder / path.name).symlink_to(path.absolute())
        else:
            (folder / path.name).write_bytes(header)
        with converting(path, "tokenizer"):
            yield folder


def generation(reader: Reader) -> dict[str, object]:
    """Sampling fields for a generation_config.json; empty if the file has none.

    The file has float32 numbers; they are rounded to the decimals that their authors wrote.
    """
    given = {name: field(reader, own) for own, name in SAMPLING.items()}
    found: dict[str, object] = {
        name: float(f"{value:.6g}") if isinstance(value, float) else value
        for name, value in given.items()
        if value is not None
    }
    return {"do_sample": True, **found} if found.keys() - {"repetition_penalty"} else found


def require_vocabulary(path: Path, reader: Reader, *, is_bytes: bool) -> None:
    """Raise UnsupportedError if the tokenizer has no tokens, or lacks merges (byte-level), or lacks
    scores or characters (SentencePiece)."""
    listed = [contents(reader, f"tokenizer.ggml.{name}") for name in ("tokens", "merges", "scores")]
    has_merges = listed[1] is not None
    name, splits = ("merges", listed[1]) if is_bytes or has_merges else ("scores", listed[2])
    for own, given in (("tokens", listed[0]), (name, splits)):
        if not isinstance(given, list):
            got = "none" if given is None else f"{given!r:.100}"
            raise refuse(path, f"tokenizer.ggml.{own}", "a list", got)
    if name == "merges":
        return
    tokens, scores, types = (
        entries(reader, f"tokenizer.ggml.{own}") for own in ("tokens", "scores", "token_type")
    )
    if len(tokens) != len(scores):
        wanted = f"{len(tokens)}, one of each token"
        raise refuse(path, "tokenizer.ggml.scores", wanted, str(len(scores)))
    known = {*tokens}
    for token, type_ in zip(tokens, types, strict=False):
        lacking = {*str(token)} - known if type_ == NORMAL else ()
        if lacking:  # llama.cpp joins it to others, but merges need it as a token
            wanted = f"{min(lacking)!r}, a character of {token!r}, as a token"
            raise refuse(path, "tokenizer.ggml.tokens", wanted, "none")


def require_merges(path: Path, reader: Reader) -> None:
    """Raise UnsupportedError for merges that are no pairs of tokens which make a token."""
    tokens, merges = (entries(reader, f"tokenizer.ggml.{own}") for own in ("tokens", "merges"))
    known = {*map(str, tokens)}
    for merge in map(str, merges):
        left, _, right = merge.partition(" ")
        if not right:
            wanted = "two tokens with a space between them in each"
            raise refuse(path, "tokenizer.ggml.merges", wanted, repr(merge))
        if lacking := [each for each in (left, right, left + right) if each not in known]:
            wanted = f"{lacking[0]!r}, of the merge {merge!r}, as a token"
            raise refuse(path, "tokenizer.ggml.merges", wanted, "none")
