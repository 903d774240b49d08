"""The text that quality is measured on, and the windows that it is cut into.

Decision: the text is read from Python's own language reference, as examples/tiny-llama was trained
on it; nothing is copied or downloaded. It differs from one Python to the next, so its name and hash
stand with every figure.
"""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvgraph.contract.manifest import NOT_PLAIN
from kvgraph.contract.tokenizer import NAME, encode, read_tokenizer
from kvgraph.errors import MissingDependencyError, ModelError, RequestError

HELD_SHARE = 0.05
WINDOW_TOKENS = 512
"""Context of a score: the text is cut into pieces of this length, each a request of its own."""

Windows = Sequence[npt.NDArray[np.int32]]


@dataclass(frozen=True, slots=True)
class Text:
    """A text to score, its name in the manifest, and the SHA-256 of its UTF-8 bytes."""

    name: str
    content: str

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.content.encode()).hexdigest()


def read_text(path: Path | None) -> Text:
    """The text of a UTF-8 file, or the held-out text where no path is given.

    In its name U+FFFD stands for what a manifest does not hold.
    """
    if path is None:
        return held_out_text()
    try:
        content = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise RequestError(f"{path}: expected text in UTF-8, got {error}") from error
    return Text(NOT_PLAIN.sub("\ufffd", path.name), content)


def held_out_text() -> Text:
    """The last paragraphs of each topic of Python's reference: what tiny-llama was not trained on.

    A paragraph counts where it is first seen, longest topic first, since topics quote each other.
    """
    try:
        from pydoc_data.topics import topics
    except ImportError as error:
        raise MissingDependencyError(
            "pydoc_data: the default text comes from it, not in this Python; give a text file"
        ) from error
    seen: set[str] = set()
    held = []
    for _, content in sorted(topics.items(), key=lambda item: (-len(item[1]), item[0])):
        parts = [p for p in dict.fromkeys(content.strip("\n").split("\n\n")) if p not in seen]
        seen.update(parts)
        held.append("\n\n".join(parts[len(parts) - round(HELD_SHARE * len(parts)) :]))
    name = f"pydoc_data.topics of Python {platform.python_version()}, last 5 % of each topic"
    return Text(name, "\n\n".join(part for part in held if part))


def cut_windows(text: Text, source: Path, bos: int | None, length: int, most: int) -> Windows:
    """At most `most` tokens to predict, in windows of `length`, each behind the `bos` token.

    ModelError: `source` has no tokenizer.json. RequestError: a text of fewer than two tokens, or a
    model of one.
    """
    if length < 2:
        raise RequestError(f"quality: expected a model of at least 2 tokens, got one of {length}")
    tokens = _tokenize(text, source)
    start = [] if bos is None else [bos]
    step = length - len(start)
    # Without a first token of its own a window cannot predict its first.
    given = tokens[: most if start else most + -(-most // (step - 1))]
    windows = [
        np.array(start + given[at : at + step], np.int32) for at in range(0, len(given), step)
    ]
    windows = [window for window in windows if len(window) > 1]
    if not windows:
        raise RequestError(f"{text.name}: expected at least two tokens, got {len(tokens)}")
    return windows


def _tokenize(text: Text, source: Path) -> list[int]:
    path = source / NAME
    if not path.is_file():
        raise ModelError(f"{source}: expected {NAME} to measure quality with, got none")
    tokenizer = read_tokenizer(path, ModelError)
    return encode(tokenizer, text.content, path, ModelError, special_tokens=False)
