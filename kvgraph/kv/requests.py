"""A request as the cache sees it: its tokens, and how many of them are processed.

|--- processed_length ---|--- active_length ---|--- later chunks ---|
[0                                                    current_length)

The module also has the checks of arguments of a manager's methods; all raise RequestError.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from operator import index
from typing import NamedTuple, TypeVar, cast

import numpy as np
import numpy.typing as npt

from kvgraph.contract.dims import NUM_STEPS
from kvgraph.contract.symbols import MAX_EXTENTS
from kvgraph.contract.values import require_integer, shown
from kvgraph.errors import RequestError

RequestID = Hashable
"""Any hashable key; an engine uses strings."""

_INT32 = np.iinfo(np.int32)

Batches = Sequence[Sequence["TextContext"]]
"""One batch of requests per replica."""

MAX_STEPS = MAX_EXTENTS[NUM_STEPS]
"""Most steps of one call."""

T = TypeVar("T")


class PageChain(NamedTuple):
    """Identities of a request's full pages, as far as they were computed; never changed in place.

    `source`: what else than tokens they are made of.
    """

    source: tuple[object, ...]
    root: bytes
    digests: list[bytes]


class TextContext:
    """The tokens of one request (prompt, then what was generated) and its lengths, all in tokens.

    - `current_length`: all tokens
    - `processed_length`: tokens whose K and V are cached
    - `active_length`: tokens of the next step: all the rest, unless set lower for a chunk
    - `cached_prefix_length`: tokens that the prefix cache gave at the last first alloc
    - `page_chain`: identities of its pages, which `PoolSettings.identities` keeps here

    Slots, because the managers read them in their innermost loops; only `active_length` is checked.
    `request_id` must not change while the request is claimed. `cache_salt` and `adapter` keep
    prefixes of different tenants and adapters apart. A request that `is_private` takes no cached
    pages and commits none. RequestError for an argument of another type, and if `tokens` is empty,
    not one-dimensional, or has a value that is no non-negative int32.
    """

    __slots__ = (
        "__weakref__",
        "_active_length",
        "_memory",
        "_tokens",
        "adapter",
        "cache_salt",
        "cached_prefix_length",
        "current_length",
        "is_private",
        "page_chain",
        "processed_length",
        "request_id",
    )

    def __init__(
        self,
        request_id: RequestID,
        tokens: Sequence[int] | npt.NDArray[np.integer],
        *,
        cache_salt: bytes = b"",
        adapter: str = "",
        is_private: bool = False,
    ) -> None:
        _require_types(request_id, cache_salt, adapter, is_private)
        self._keep(_as_int32(request_id, tokens))
        self.request_id = request_id
        self.cache_salt = cache_salt
        self.adapter = adapter
        self.is_private = is_private
        self.page_chain: PageChain | None = None
        self.current_length = self._active_length = self._tokens.size
        self.processed_length = self.cached_prefix_length = 0

    @property
    def active_length(self) -> int:
        """Tokens of the next step: all the rest, unless set lower for a chunk. RequestError unless
        it is set to an integer from 0 to the rest."""
        return self._active_length

    @active_length.setter
    def active_length(self, count: int) -> None:
        rest = self.current_length - self.processed_length
        if type(count) is not int:
            count = require_integer(f"active_length of {self.request_id!r}", count, RequestError)
        if not 0 <= count <= rest:
            raise no_part(self, count)
        self._active_length = count

    @property
    def tokens(self) -> npt.NDArray[np.int32]:
        """All tokens, `[current_length]`; a read-only view, since pages are identified by their
        tokens. The next `update` may move the tokens to other memory."""
        return self._tokens[: self.current_length]

    @property
    def active_tokens(self) -> npt.NDArray[np.int32]:
        """The tokens of the next step, `[active_length]`; a view."""
        return self._tokens[self.processed_length : self.processed_length + self.active_length]

    def update(self, *tokens: int) -> None:
        """Mark the active tokens as processed after a step, and append the generated `tokens`.

        RequestError for generated tokens after a chunk that ended before the last token.
        """
        start = self.current_length
        end = start + len(tokens)
        processed = self.processed_length + self._active_length
        if tokens:
            if processed != start:
                raise RequestError(
                    f"update of {self.request_id!r}: expected no generated tokens after a chunk "
                    f"that ends at {processed} of {start} tokens, got {len(tokens)}"
                )
            if end > self._tokens.size:
                self._grow(end)
            self._append(start, tokens)
        self.current_length = end
        self.processed_length = processed
        self._active_length = end - processed

    def skip_processing(self, count: int) -> None:
        """Mark `count` tokens as processed without a step; all the rest becomes active.

        RequestError if `count` is no integer, negative, or more than the unprocessed tokens.
        """
        if type(count) is not int:
            count = require_integer(f"skip_processing of {self.request_id!r}", count, RequestError)
        rest = self.current_length - self.processed_length
        if not 0 <= count <= rest:
            raise RequestError(
                f"skip_processing of {self.request_id!r}: expected 0 to {rest} tokens, got {count}"
            )
        self.processed_length += count
        self._active_length = rest - count

    def rewind(self) -> None:
        """Mark all tokens as unprocessed, to recompute them after the row was released."""
        self.processed_length = self.cached_prefix_length = 0
        self._active_length = self.current_length

    def _append(self, start: int, tokens: tuple[int, ...]) -> None:
        try:
            for place, token in enumerate(tokens, start):  # mostly one: an array would be slower
                value = index(token)
                if value < 0:  # an embedding table would return its last row
                    raise ValueError(value)
                self._memory[place] = value
        except (OverflowError, ValueError, TypeError) as error:
            raise RequestError(
                f"update of {self.request_id!r}: expected non-negative int32 tokens, got {tokens}"
            ) from error

    def _grow(self, least: int) -> None:
        grown = np.empty(max(least, 2 * self._tokens.size, 64), np.int32)
        grown[: self._tokens.size] = self._tokens
        self._keep(grown)

    def _keep(self, memory: npt.NDArray[np.int32]) -> None:
        """Set the tokens' memory; views of `_tokens` are read-only."""
        self._memory, self._tokens = memory, memory.view()
        self._tokens.flags.writeable = False

    def __setstate__(self, state: tuple[None, dict[str, object]]) -> None:
        """Restore a copy, with memory of its own: `copy.copy` gives the memory of the original."""
        for name, value in state[1].items():
            setattr(self, name, value)
        self._keep(self._memory.copy())

    def __repr__(self) -> str:
        return (
            f"TextContext({self.request_id!r}, processed={self.processed_length}, "
            f"active={self.active_length}, current={self.current_length})"
        )


def no_part(ctx: TextContext, count: int) -> RequestError:
    """The error of an `active_length` of `count` tokens, which is not 0 to the rest."""
    rest = ctx.current_length - ctx.processed_length
    return RequestError(
        f"active_length of {ctx.request_id!r}: expected 0 to {rest} tokens, the rest of "
        f"{ctx.current_length}, got {count}"
    )


def _require_types(
    request_id: RequestID, cache_salt: bytes, adapter: str, is_private: bool
) -> None:
    require_key(request_id)
    for name, value, kind in (
        ("cache_salt", cache_salt, bytes),
        ("adapter", adapter, str),
        ("is_private", is_private, bool),
    ):
        if not isinstance(value, kind):
            raise RequestError(
                f"{name} of {request_id!r}: expected {kind.__name__}, got {shown(value)}"
            )
    try:
        adapter.encode()
    except UnicodeEncodeError as error:
        raise RequestError(
            f"adapter of {request_id!r}: expected text in Unicode, got {shown(adapter)}"
        ) from error


def _as_int32(
    request_id: RequestID, tokens: Sequence[int] | npt.NDArray[np.integer]
) -> npt.NDArray[np.int32]:
    try:
        given = np.asarray(tokens)
    except ValueError as error:  # rows of different lengths
        raise RequestError(f"tokens of {request_id!r}: expected integers, got {error}") from error
    if given.ndim != 1 or given.size == 0:
        raise RequestError(
            f"tokens of {request_id!r}: expected at least one token in one dimension, "
            f"got shape {list(given.shape)}"
        )
    if given.dtype.kind not in "iu":
        raise RequestError(f"tokens of {request_id!r}: expected integers, got {given.dtype}")
    low, high = int(given.min()), int(given.max())
    if low < 0 or high > _INT32.max:
        raise RequestError(
            f"tokens of {request_id!r}: expected non-negative int32 values, got {low} to {high}"
        )
    return given.astype(np.int32)  # always a copy: the caller may change its array


def at_replica(each: Sequence[T], replica_idx: int, call: str) -> T:
    """Return `each[replica_idx]`, where `each` has one element per replica; RequestError if out of
    range."""
    if type(replica_idx) is not int:
        replica_idx = require_integer(f"{call}: replica_idx", replica_idx, RequestError)
    if not 0 <= replica_idx < len(each):
        hint = "; give a number of steps as num_steps=" if call == "alloc" else ""
        raise RequestError(
            f"{call}: expected replica_idx below data_parallel_degree={len(each)}, "
            f"got {replica_idx}{hint}"
        )
    return each[replica_idx]


def per_replica(batches: Batches | Sequence[TextContext], num_replicas: int, call: str) -> Batches:
    """One batch per replica; a flat list of requests is the batch of the only replica.

    An empty list is its empty batch. Each batch is checked to be a sequence; the caller checks
    its elements.
    """
    _require_list(batches, call)
    if num_replicas == 1 and (not batches or isinstance(batches[0], TextContext)):
        return [cast(Sequence[TextContext], batches)]
    if len(batches) != num_replicas:
        raise RequestError(
            f"{call}: expected {num_replicas} replica batches (data_parallel_degree), "
            f"got {len(batches)}"
        )
    for batch in batches:
        _require_list(batch, call)
    return cast(Batches, batches)


def _require_list(given: object, call: str) -> None:
    if type(given) is not list and not isinstance(given, Sequence):  # a list is the quick case
        raise RequestError(
            f"{call}: expected a list of TextContexts for each replica, got {shown(given)}"
        )


def require_context(given: object, call: str) -> None:
    if not isinstance(given, TextContext):
        raise RequestError(f"{call}: expected a TextContext, got {shown(given)}")


def require_key(request_id: RequestID) -> None:
    try:
        hash(request_id)
    except TypeError as error:
        raise RequestError(f"request_id: expected a hashable key, got {request_id!r}") from error


def require_unclaimed(request_id: RequestID, claimed_on: int | None) -> None:
    """Raise RequestError if `claimed_on`, the replica with the request, is not None."""
    if claimed_on is not None:
        raise RequestError(
            f"claim of {request_id!r}: expected a request that is not claimed, "
            f"got one claimed on replica {claimed_on} already"
        )


def require_steps(num_steps: int, lookahead: int = 0) -> int:
    """Check the arguments, and return the tokens beyond the active ones that they need."""
    if type(num_steps) is not int:
        num_steps = require_integer("num_steps", num_steps, RequestError)
    if type(lookahead) is not int:
        lookahead = require_integer("lookahead", lookahead, RequestError)
    if not 1 <= num_steps <= MAX_STEPS:
        raise RequestError(f"num_steps: expected 1 to {MAX_STEPS}, got {num_steps}")
    if lookahead < 0:
        raise RequestError(f"lookahead: expected >= 0, got {lookahead}")
    return num_steps - 1 + lookahead
