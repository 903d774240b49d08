"""Files about text that travel with a model: tokenizer, chat template, generation config."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from kvgraph.contract.tokenizer import read_tokenizer
from kvgraph.errors import ModelError

NAMES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "generation_config.json",
    "chat_template.jinja",
)
TOKENIZER, _, _, GENERATION, _ = NAMES
MORE_TEMPLATES = "additional_chat_templates"
"""A folder of them, in which transformers keeps those that are not the default."""


def text_files(folder: Path) -> dict[str, Path]:
    """Those of NAMES that are in `folder`, and templates: name in the artifact -> path here."""
    more = [f"{MORE_TEMPLATES}/{p.name}" for p in sorted((folder / MORE_TEMPLATES).glob("*.jinja"))]
    return {name: folder / name for name in (*NAMES, *more) if (folder / name).is_file()}


def require_tokenizer(path: Path) -> None:
    """ModelError if the file is there and damaged: the artifact would only fail at its user's."""
    if path.is_file():
        read_tokenizer(path, ModelError)


def end_tokens(path: Path) -> tuple[tuple[int, ...], int | None]:
    """End tokens and the begin token that a generation_config.json names; ModelError if damaged."""
    if not path.is_file():
        return (), None
    try:
        config = json.loads(path.read_text())
        bos = config.get("bos_token_id")
        return as_ids(config.get("eos_token_id")), None if bos is None else int(bos)
    except (ValueError, TypeError, AttributeError) as error:
        raise ModelError(f"{path}: expected a generation config, got {error}") from error


def as_ids(given: int | Sequence[int] | None) -> tuple[int, ...]:
    """Token ids of a field that holds one, several or None."""
    if given is None:
        return ()
    return tuple(map(int, given)) if isinstance(given, Sequence) else (int(given),)
