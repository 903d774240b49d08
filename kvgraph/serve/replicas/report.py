"""Report: pages and load of a replica, sent to the index."""

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
    """Changes since the previous report, or all pages.

    `epoch`: random at every start of an engine. `sequence`: number of the report. `added`,
    `removed`: packed digests of pages. `started`: ids of requests that had their first token, or
    have ended.
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
    """Only in whole reports."""
    role: str = DECODE
    """`DECODE` or `PREFILL`."""


def packed(digests: Iterable[bytes]) -> bytes:
    """The last 64 bits of each digest, by which routers distinguish pages."""
    return b"".join([digest[-8:] for digest in digests])


def unpacked(data: bytes) -> Sequence[int]:
    numbers = np.frombuffer(data, "<u8").tolist()
    return numbers  # type: ignore[no-any-return]
