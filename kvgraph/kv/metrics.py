"""Counters of a cache."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(slots=True)
class KVCacheMetrics:
    """Counters since the start or the last reset; `a + b` adds field by field.

    `input_tokens`: prefill tokens that had to be computed. `cache_tokens`: prefill tokens taken
    from the cache. Both are counted when an alloc succeeds; decode tokens are in neither. If a
    request waits for a tier, its `cache_tokens` are counted when its pages are loaded.

    `load_failures`: requests. `inflight_ops`: copies and writes that are queued or running now. All
    other fields count pages (blocks). `offload_dropped`: pages that a tier did not get, counted
    once for each such tier. `disk_*` and `remote_*`: pages of the stores of these names; a
    manager's `tier_stats()` has the figures of every store by its name.
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
