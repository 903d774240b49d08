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

    def tried_again(self, number: int) -> Order:
        """With an id of its own: a replica may run the try before it still."""
        return self._replace(request_id=f"{self.request_id}-{number}")


def try_before(request_id: str) -> str:
    """The id of the try before this one; of the first one, its own."""
    first, _, number = request_id.rpartition("-")
    if not number.isdigit() or not first:
        return request_id
    return first if number == "1" else f"{first}-{int(number) - 1}"


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
