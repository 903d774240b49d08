"""What a replica tells the index: which pages it holds, and what it does."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from kvgraph.serve.facts import EngineFacts
from kvgraph.serve.load import Load

DECODE, PREFILL = "decode", "prefill"
"""Roles: a replica that answers requests, and one that computes prompts for others."""


@dataclass(frozen=True, slots=True)
class Report:
    """Changes since the report before it, or all that is held.

    `epoch` is new at every start of an engine; `sequence` counts its reports. `added` and `removed`
    are packed digests of pages. `started`: requests that had their first token, or have ended.
    """

    replica: str
    epoch: bytes
    sequence: int
    is_whole: bool
    added: bytes
    removed: bytes
    started: tuple[str, ...]
    load: Load
    facts: EngineFacts | None = None
    """Of whole reports."""
    role: str = DECODE
    """`DECODE` or `PREFILL`."""


def packed(digests: Iterable[bytes]) -> bytes:
    """The last 64 bits of each digest: what a router tells pages apart by."""
    return b"".join([digest[-8:] for digest in digests])


def unpacked(data: bytes) -> Sequence[int]:
    numbers = np.frombuffer(data, "<u8").tolist()
    return numbers  # type: ignore[no-any-return]
