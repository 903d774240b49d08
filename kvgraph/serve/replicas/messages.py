"""What travels between an ingress and a replica."""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

from kvgraph.runtime.sampling import Token
from kvgraph.runtime.sampling_params import SamplingParams


class Order(NamedTuple):
    """A request: token ids as little-endian int32, and packed digests of the full pages."""

    request_id: str
    prompt: bytes
    sampling: SamplingParams
    cache_salt: bytes
    chain: bytes

    @property
    def num_tokens(self) -> int:
        return len(self.prompt) // 4


class Accepted(NamedTuple):
    """The first message of a request that can complete."""


class Refused(NamedTuple):
    """The only message of one that cannot; the sentence of the error."""

    why: str


class Piece(NamedTuple):
    """All tokens since the last message."""

    tokens: list[Token]
    cached_tokens: int
    queue_seconds: float


Message: TypeAlias = Accepted | Refused | Piece
