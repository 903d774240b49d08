"""tokenizer.json: read and used so that what the library makes of a bad one is an error of ours.

The library raises bare Exceptions, and where its own code fails a PanicException, which is none.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from kvgraph.contract.files import open_regular
from kvgraph.errors import KVGraphError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

NAME = "tokenizer.json"


def read_tokenizer(path: Path, refusal: type[KVGraphError]) -> Tokenizer:
    """The tokenizer in a file; `refusal` where it is damaged."""
    from tokenizers import Tokenizer

    expected = "expected a tokenizer, got a damaged one"
    with _refusing(path, refusal, expected), open_regular(path) as file:
        return Tokenizer.from_str(file.read().decode())


def encode(
    tokenizer: Tokenizer,
    text: str,
    path: Path,
    refusal: type[KVGraphError],
    *,
    special_tokens: bool,
) -> list[int]:
    """Token ids; `refusal` where the tokenizer, which was read from `path`, fails at it."""
    with _refusing(path, refusal, "expected a tokenizer that encodes the text, got one that fails"):
        ids: list[int] = tokenizer.encode(text, add_special_tokens=special_tokens).ids
    return ids


def is_panic(error: BaseException) -> bool:
    """Whether a library in Rust failed on its own account: no Exception, and no interrupt."""
    return type(error).__name__ == "PanicException"


@contextmanager
def _refusing(path: Path, refusal: type[KVGraphError], expected: str) -> Iterator[None]:
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception) and not is_panic(error):
            raise
        why = " ".join(str(error).split()) or type(error).__name__
        raise refusal(f"{path}: {expected} ({why})") from error
