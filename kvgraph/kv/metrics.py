"""Counters of a cache."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(slots=True)
class KVCacheMetrics:
    """Counters since the start or the last reset; `a + b` adds field by field.

    `input_tokens` are prefill tokens that had to be computed, `cache_tokens` prefill tokens taken
    from the cache. Both are counted when an alloc succeeds; decode tokens are in neither.
    Of a request that waits for a tier `cache_tokens` is counted when its pages have landed.
    The rest counts pages (blocks; `offload_dropped` too, once for each tier that did not get one),
    but for `load_failures`, which are requests, and `inflight_ops`, the copies and writes that are
    queued or running now. `disk_*` and `remote_*` count the stores of these names; a manager's
    `tier_stats()` has the figures of every store by its name.
    """

    input_tokens: int = 0
    cache_tokens: int = 0
    device_blocks_served: int = 0
    h2d_blocks_copied: int = 0
    d2h_blocks_copied: int = 0
    disk_blocks_written: int = 0
    disk_blocks_read: int = 0
    remote_blocks_written: int = 0
    remote_blocks_read: int = 0
    evictions: int = 0
    inflight_ops: int = 0
    load_failures: int = 0
    offload_dropped: int = 0

    @property
    def prompt_tokens(self) -> int:
        return self.input_tokens + self.cache_tokens

    @property
    def cache_hit_rate(self) -> float:
        """Share of prompt tokens taken from the cache; 0 without tokens."""
        return self.cache_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    def __add__(self, other: KVCacheMetrics) -> KVCacheMetrics:
        names = (field.name for field in fields(self))
        return KVCacheMetrics(
            **{name: getattr(self, name) + getattr(other, name) for name in names}
        )

    def __sub__(self, other: KVCacheMetrics) -> KVCacheMetrics:
        names = (field.name for field in fields(self))
        return KVCacheMetrics(
            **{name: getattr(self, name) - getattr(other, name) for name in names}
        )
