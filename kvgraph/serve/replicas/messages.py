"""Messages between an ingress and a replica."""

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

    def tried_again(self, number: int) -> Order:
        """The order with a new id, since a replica may still run the previous try."""
        return self._replace(request_id=f"{self.request_id}-{number}")


def try_before(request_id: str) -> str:
    """The id of the previous try; the same id for the first try."""
    first, _, number = request_id.rpartition("-")
    if not number.isdigit() or not first:
        return request_id
    return first if number == "1" else f"{first}-{int(number) - 1}"


class Accepted(NamedTuple):
    """First message for a request that was accepted."""


class Refused(NamedTuple):
    """Only message for a request that was refused; `why`: the error's message."""

    why: str


class Piece(NamedTuple):
    """Message with all tokens since the previous one."""

    tokens: list[Token]
    cached_tokens: int
    queue_seconds: float


Message: TypeAlias = Accepted | Refused | Piece
