"""Read the text on which quality is measured, and cut it into windows.

Decision: the default text is Python's own language reference, because examples/tiny-llama was
trained on it; nothing is copied or downloaded. It differs between versions of Python, so every
figure comes with the text's name and hash.
"""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvgraph.contract.manifest_values import NOT_PLAIN
from kvgraph.contract.tokenizer import NAME, encode, read_tokenizer
from kvgraph.errors import MissingDependencyError, ModelError, RequestError

HELD_SHARE = 0.05
WINDOW_TOKENS = 512
"""Tokens of a window. The text is cut into windows of this length, and each is one request."""

Windows = Sequence[npt.NDArray[np.int32]]


@dataclass(frozen=True, slots=True)
class Text:
    """A text to score, its name in the manifest, and the SHA-256 (hex) of its UTF-8 bytes."""

    name: str
    content: str

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.content.encode()).hexdigest()


def read_text(path: Path | None) -> Text:
    """The text of a UTF-8 file, or the held-out text if `path` is None.

    In its name, U+FFFD replaces characters that a manifest cannot hold.
    RequestError: the file is not UTF-8.
    """
    if path is None:
        return held_out_text()
    try:
        content = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise RequestError(f"{path}: expected text in UTF-8, got {error}") from error
    return Text(NOT_PLAIN.sub("\ufffd", path.name), content)


def held_out_text() -> Text:
    """The last paragraphs of each topic of Python's reference, on which tiny-llama was not trained.

    Topics quote each other, so a paragraph counts only in the first topic with it, longest first.
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
    """Cut a text into windows of `length` tokens, with at most `most` tokens to predict in all.

    `bos`: token at the start of each window; None: none. `source`: folder with tokenizer.json.
    ModelError: there is no tokenizer.json. RequestError: the text, or the model's context, has
    fewer than two tokens.
    """
    if length < 2:
        raise RequestError(f"quality: expected a model of at least 2 tokens, got one of {length}")
    tokens = _tokenize(text, source)
    start = [] if bos is None else [bos]
    step = length - len(start)
    # Without a BOS token, a window's first text token cannot be predicted.
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
