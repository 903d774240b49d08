"""Settings of an engine: one record each for its cache, its tiers and its batches.

Memory sizes are bytes, or text such as "4GiB". RequestError names a field of the wrong type or
out of range.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, TypedDict, TypeVar

from kvgraph.contract.sizes import parse_bytes
from kvgraph.errors import RequestError
from kvgraph.kv.build import MOST_COUNT
from kvgraph.kv.memory import DEFAULT_BATCH_SIZE
from kvgraph.runtime.arguments import flag, instance, integer, optional_integer, sequence
from kvgraph.runtime.prefix_file import Prefix

MOST_ROWS = 1 << 20
"""Largest batch size: every row takes a row of the lookup table, even if unused."""

DEFAULT_DISK_BYTES = 16 << 30
"""Size limit of a disk tier if none is given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    """The pool of an engine.

    `num_pages`: pages of each leaf. None: as many as fit `cache_memory` bytes, but no more than the
    rows of a batch need at the model's maximum length; leaves with a window get what their windows
    need. Only a paged cache takes `num_pages` or `cache_memory`.
    `cache_memory`: bytes of the pool. None: 1 GiB in host memory, but at most a quarter of the
    memory of the machine or container; on a GPU, 0.9 of the memory that the weights and the
    largest step leave free. That step is run once to measure it.
    `enable_prefix_caching`: whether requests share pages of equal prefixes. None: on if the kind
    of cache can share pages.
    """

    num_pages: int | None = None
    cache_memory: int | str | None = None
    enable_prefix_caching: bool | None = None

    def __post_init__(self) -> None:
        caching = self.enable_prefix_caching
        _normalize(
            self,
            num_pages=optional_integer("num_pages", self.num_pages, 1, MOST_COUNT),
            cache_memory=self.nbytes,
            enable_prefix_caching=None
            if caching is None
            else flag("enable_prefix_caching", caching),
        )
        if self.num_pages is not None and self.cache_memory is not None:
            raise RequestError(
                f"num_pages, cache_memory: expected one of the two, got {self.num_pages} pages and "
                f"{self.cache_memory} bytes"
            )

    @property
    def nbytes(self) -> int | None:
        """`cache_memory` in bytes; None if not given."""
        given = self.cache_memory
        return None if given is None else parse_bytes("cache_memory", given)


@dataclass(frozen=True, slots=True, kw_only=True)
class TierConfig:
    """The tiers below an engine's pool, which keep pages that are evicted from it. Default: none.

    `total_num_host_pages`: pages of each leaf in host memory; or `host_memory`: their bytes.
    `disk`: a folder, used by one user. `disk_bytes`: its size limit; None: 16 GiB.
    `remote`: URL of a server that many machines share.
    `prefixes`: files of `kvgraph prefill`, or results of `read_prefix`; they are only read.
    """

    total_num_host_pages: int | None = None
    host_memory: int | str = 0
    disk: str | Path | None = None
    disk_bytes: int | str | None = None
    remote: str | None = None
    prefixes: Sequence[str | Path | Prefix] = ()

    def __post_init__(self) -> None:
        pages = self.total_num_host_pages
        _normalize(
            self,
            total_num_host_pages=optional_integer("total_num_host_pages", pages, 0, MOST_COUNT),
            host_memory=parse_bytes("host_memory", self.host_memory),
            disk_bytes=None if self.disk_bytes is None else self.disk_nbytes,
            prefixes=tuple(sequence("prefixes", "file", self.prefixes)),
        )
        if self.disk is not None:
            instance("disk", self.disk, (str, Path), "a folder")
            if not str(self.disk):
                raise RequestError("disk: expected a folder, got an empty name")
        if self.remote is not None:
            instance("remote", self.remote, str, "a URL")
        for index, prefix in enumerate(self.prefixes):
            instance(f"prefixes[{index}]", prefix, (str, Path, Prefix), "a file of kvgraph prefill")
        if pages is not None and self.host_memory:
            raise RequestError(
                f"total_num_host_pages, host_memory: expected one of the two, got {pages} pages "
                f"and {self.host_memory} bytes"
            )
        if self.disk is None and self.disk_bytes is not None:
            raise RequestError(
                f"disk_bytes: expected a folder, disk, that it limits, got {self.disk_bytes} "
                "bytes and no disk"
            )

    @property
    def host_nbytes(self) -> int:
        """`host_memory` in bytes."""
        return parse_bytes("host_memory", self.host_memory)

    @property
    def disk_nbytes(self) -> int:
        """`disk_bytes` in bytes, or the default."""
        given = self.disk_bytes
        return DEFAULT_DISK_BYTES if given is None else parse_bytes("disk_bytes", given)


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchConfig:
    """The steps of an engine.

    `max_batch_size`: most requests in a step.
    `max_batch_tokens`: most new tokens of a step; a longer prompt is processed in chunks. None: the
    session's `step_tokens`. The compiled graph may bound both further. Over a padded cache,
    requests run one after another.
    `max_prefill_tokens`: most prompt tokens of a step in which other requests decode, so that
    their next token does not wait for a whole prompt. A number has no effect on requests that come
    while none decodes: they start together. "auto": as many tokens as take the time of the decode
    rows, by the times of earlier steps, and more if more requests wait. None: no limit.
    """

    max_batch_size: int = DEFAULT_BATCH_SIZE
    max_batch_tokens: int | None = None
    max_prefill_tokens: int | Literal["auto"] | None = None

    def __post_init__(self) -> None:
        _normalize(
            self,
            max_batch_size=integer("max_batch_size", self.max_batch_size, 1, MOST_ROWS),
            max_batch_tokens=optional_integer("max_batch_tokens", self.max_batch_tokens, 1),
            max_prefill_tokens=_prefill_tokens(self.max_prefill_tokens),
        )


class ConfigFields(TypedDict, total=False):
    """Keywords of an engine: the fields of all config records."""

    num_pages: int | None
    cache_memory: int | str | None
    enable_prefix_caching: bool | None
    total_num_host_pages: int | None
    host_memory: int | str
    disk: str | Path | None
    disk_bytes: int | str | None
    remote: str | None
    prefixes: Sequence[str | Path | Prefix]
    max_batch_size: int
    max_batch_tokens: int | None
    max_prefill_tokens: int | Literal["auto"] | None


Config = TypeVar("Config", CacheConfig, TierConfig, BatchConfig)


def configured(
    name: str, kind: type[Config], given: Config | None, options: ConfigFields
) -> Config:
    """The record `given` as keyword `name`, or a `kind` of those `options` that are its fields.

    RequestError if both are given, or `given` is not a `kind`.
    """
    names = {field.name for field in fields(kind)}
    own: dict[str, Any] = {option: value for option, value in options.items() if option in names}
    if given is None:
        return kind(**own)
    instance(name, given, kind, f"a {kind.__name__}")
    for option in own:
        raise RequestError(
            f"{name}, {option}: expected one of the two, got both; "
            f"give {option} in the {kind.__name__}"
        )
    return given


def require_known(options: ConfigFields) -> None:
    """Raise TypeError, as Python does, for a keyword that is not a field of any record."""
    for option in options.keys() - ConfigFields.__annotations__.keys():
        raise TypeError(f"Engine.__init__() got an unexpected keyword argument {option!r}")


def _prefill_tokens(value: object) -> int | Literal["auto"] | None:
    if value is None or value == "auto":
        return value
    return integer("max_prefill_tokens", value, 1, or_else=", 'auto' or None")


def _normalize(record: object, **values: object) -> None:
    """Replace the fields of a frozen `record` by their checked `values`."""
    for name, value in values.items():
        object.__setattr__(record, name, value)
